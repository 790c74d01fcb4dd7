"""What others would have made of a model at the same cost, without training, measured side by side.

```
model, smaller model, batches
  └─ layers.py     linear layers and convolutions, multiply-adds, and the limit: what the smaller model costs
       ├─ pruning.py              hidden neurons, channels and heads of least score go: magnitude, Wanda score
       ├─ shapes.py               every layer as two by its SVD, or as random blocks
       ├─ torch_pruning.py        what Torch-Pruning makes of it
       └─ onnx_runtime.py         what a CPU user would pick instead: ONNX Runtime, also with 8-bit weights
            └─ compare.py    each method's cost, time and quality, or why it was skipped
```
"""

from crystallite.baselines.compare import METHODS, Row, compare, table
from crystallite.graph.neuron_groups import NeuronGroup

__all__ = ["METHODS", "NeuronGroup", "Row", "compare", "table"]
