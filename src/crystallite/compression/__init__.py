"""Smaller operators that keep the function of a trained network, fitted in closed form and without labels.

```
model, data/calibration.py: what is fitted on, what only judges
  └─ session.py        the model in segments (statistics/observer.py); what its layers read, write and add to a stream
       ├─ recurrent.py    recurrent networks as matrices that multiply rows
       ├─ experts.py      layers that only some positions reach
       ├─ sample_check.py   enough data for every layer, or no work begins
       ├─ whole_cost.py, latency.py, int8_latency.py   what the model and its layers cost
       ├─ influence.py    which errors of a layer reach the outputs
       └─ statistics/moments.py → regression.py   sums over samples → the best dense layer, and what others lose
            ├─ heads.py, pruning.py   hidden neurons, channels and numbers of heads that can go
            ├─ operator_specs.py, partitions.py   low rank, blocks
            └─ probing.py → allocation.py   output error for every size → sizes under a budget
                 └─ sequential.py, joint.py   layer after layer, from what the layers before it leave
                      └─ assembling.py, model_fit.py   smaller modules in the places of the layers
                           └─ polish.py, guarantee.py   a little training; what can be promised of the result
```

`annealing/fitting.py` is something else: it fits null models to weights.
"""

from crystallite.compression.compress import compress

__all__ = ["compress"]
