"""What Torch-Pruning makes of a model: groups from its own dependency graph, scored by the norm of their weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping

from torch import nn

from crystallite.baselines.layers import largest
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.outputs import same_structure, tensors

__all__ = ["pruned_by_graph"]


def pruned_by_graph(
    model: nn.Module, names: Collection[str], heads: Mapping[str, int], batch: Batch, limit: int
) -> nn.Module:
    """The model as Torch-Pruning prunes it, the same share of every group, without training.

    - `names`: layers whose outputs may be pruned. Those that the model returns are left alone.
    - `heads`: how many attention heads a query, key or value layer writes; they go as wholes.

    Refused where the package is missing, cannot follow the model, or returns one that does not run.
    """
    try:
        import torch_pruning
    except ImportError:
        raise InvalidOption("needs torch-pruning: pip install torch-pruning") from None
    example = batch.arguments
    # one head is left at least: a group that would vanish is not touched at all
    least = max((1 / count for count in heads.values()), default=0.0) + 1e-6

    def made(share: float) -> nn.Module:
        small = copy.deepcopy(model)
        modules = dict(small.named_modules())
        graph = torch_pruning.DependencyGraph().build_dependency(small, example_inputs=example)
        ignored = [module for name, module in modules.items() if name not in names and _multiplies(module)]
        # what a group would change reaches the outputs if it writes a node from which nothing goes on
        for group in graph.get_all_groups(root_module_types=[nn.Linear, nn.Conv2d]):
            if any(not edge.target.outputs and graph.is_out_channel_pruning_fn(edge.handler) for edge, _ in group):
                ignored.append(group[0].dep.target.module)
        pruner = torch_pruning.pruner.BasePruner(
            small, example, torch_pruning.importance.GroupMagnitudeImportance(), pruning_ratio=1 - share,
            ignored_layers=ignored, in_channel_groups={}, out_channel_groups={},  # its defaults are shared by calls
            num_heads={modules[name]: count for name, count in heads.items()}, prune_num_heads=True,
            prune_head_dims=False, head_pruning_ratio=1 - max(share, least),
        )  # fmt: skip
        pruner.step()
        return small

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters of the user's that it guesses about
        try:
            small = largest(made, batch, limit)
            same_structure(tensors(batch.run(model)), tensors(batch.run(small)))
        except InvalidOption:
            raise
        except Exception as error:  # whatever its tracing raises
            reason = str(error).strip().partition("\n")[0]
            kind = type(error).__name__
            raise InvalidOption(f"Torch-Pruning cannot prune this model: {kind}: {reason:.200}") from error
    return small


def _multiplies(module: nn.Module) -> bool:
    """Whether it is a layer with a matrix; norms follow the layers around them."""
    return not list(module.children()) and any(parameter.ndim > 1 for parameter in module.parameters())
