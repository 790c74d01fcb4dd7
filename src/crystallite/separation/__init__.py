"""Upgrade learning: continued training inside a structure, and continued training until the structure is exact.

```
trained model, batches
  └─ partitioning/        chains of weights that share hidden neurons (`graph/chains.py`); a block for every neuron:
                          inputs that vary together, neurons where most of their variance is explained
                          (modules.py: functional modules that were found)
       └─ scale.py             hidden neurons in balanced units, so that a bound on weights means something
            └─ refit.py             blocks fitted by least squares to what the dense layers compute
                 └─ straight_through.py  the Neyman test inside the forward pass, its threshold rising to the null's
                      └─ training.py          learning rate and threshold over time; checkpoints of both
                           └─ task.py, search.py   all of that as one call; recipes tried on a part of the data
                           └─ stand_in.py          partitions tried on a network with new weights, which has not seen
                                                   what judges
                                └─ upgrade.py           harden, proof.py by `anneal` and `decompose`, blocks, record
```

`update.py` is the paper's update rule: a global update shared out to the sub-operators. `transfer.py` carries tensors
and the state of an optimizer between a dense model and its blocks, both ways. Blocks train with ordinary `backward()`
and any optimizer; weights between them do not exist, so they have no gradients and no moments. `lora.py` lets PEFT's
adapters train them.

The package is named after a thing, so that `upgrade` stays a function.
"""

from crystallite.graph.chains import Chain, find_chains
from crystallite.partitioning.input_clusters import cluster_partition
from crystallite.partitioning.partition import Partition, decorrelated_partition, random_partition
from crystallite.separation.lora import lora_for_blocks
from crystallite.separation.transfer import to_blocks, to_dense, transfer_optimizer
from crystallite.separation.update import mask_gradients, redistribute, updated
from crystallite.separation.upgrade import upgrade

__all__ = [
    "Chain",
    "Partition",
    "cluster_partition",
    "decorrelated_partition",
    "find_chains",
    "lora_for_blocks",
    "mask_gradients",
    "random_partition",
    "redistribute",
    "to_blocks",
    "to_dense",
    "transfer_optimizer",
    "updated",
    "upgrade",
]
