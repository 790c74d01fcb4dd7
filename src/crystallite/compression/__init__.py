"""Smaller operators that keep the function of a trained network, fitted in closed form and without labels.

```
model, batches
  └─ calibration.py    what is fitted on, what only judges
       └─ running.py       the model in stretches; what its layers read, write and add to a residual stream
            ├─ places.py, recurrent.py   convolutions and recurrent networks as matrices that multiply rows
            ├─ latency.py, int8_latency.py   what layers cost in time, where the budget counts that
            ├─ influence.py   which errors of a layer reach the outputs
            └─ regression.py   sums over samples → the best dense layer, and how much worse any other is
                 ├─ groups.py, pruning.py   hidden neurons and channels that can go
                 ├─ forms.py, partitions.py   low rank, blocks, blocks and a coupling
                 └─ probing.py → allocation.py   damage at the outputs for every size → sizes under a budget
                      └─ sequential.py, jointly.py   layer after layer, from what the layers before it leave
                           └─ assembling.py, fit.py      smaller modules in the places of the layers
```

`annealing/fitting.py` is something else: it fits null models to weights.
"""

from crystallite.compression.compress import compress

__all__ = ["compress"]
