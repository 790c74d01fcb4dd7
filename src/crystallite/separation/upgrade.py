"""`upgrade`: continued training to exact separation."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from crystallite.annealing import nulls
from crystallite.core.errors import CheckpointError, CrystalliteError, InvalidOption
from crystallite.core.progress import phase
from crystallite.core.suggest import matching, suggest_keywords
from crystallite.data.batch import Batch, batches, repeatable
from crystallite.data.positions import count_positions
from crystallite.discovery.modules import Modules
from crystallite.graph.chains import Chain, find_chains
from crystallite.graph.neuron_groups import neuron_groups
from crystallite.graph.trace import Mode, trace
from crystallite.models.conv1d import turn_back_, turn_conv1d_
from crystallite.models.manifest import source_sha256
from crystallite.models.preparing import note_call_, prepared
from crystallite.models.record import Recipe, RecipeSearch, StorableNull, UpgradedOptions, record, set_record_
from crystallite.models.transformers_folder import write_config
from crystallite.models.typed_json import from_plain, to_plain
from crystallite.partitioning.candidates import candidate_partitions
from crystallite.partitioning.partition import Partition, sharing_inputs
from crystallite.partitioning.weights import owner, parameter
from crystallite.reorganization.blocks import clear_idle_, in_blocks
from crystallite.separation.modules import module_partition
from crystallite.separation.proof import drop_strays_, prove
from crystallite.separation.readouts import readouts_for
from crystallite.separation.scale import balance_
from crystallite.separation.search import Choices, find_recipe
from crystallite.separation.stand_in import can_stand_in, choose_partition
from crystallite.separation.straight_through import harden_
from crystallite.separation.task import Task, takes_probabilities
from crystallite.separation.training import Loss, Metric, ends_of
from crystallite.statistics.checkpoints import Checkpoints, State

__all__ = ["upgrade"]

_RATES = (5e-3, 1e-2, 2e-2)  # the first ones hold where nothing can be tried
_SMOOTHINGS = (0.0, 0.1)
_BLOCK_LOSSES = (1.0, 0.0, 3.0)
_POSITIONS = 128  # of a batch, by which units are told to matter or not
_SAMPLES = 8192  # rows that least squares reads, or four times the inputs of the widest block


@suggest_keywords
def upgrade(
    model: nn.Module,
    *,
    data: Any,
    held_out: Any = None,
    blocks: int | None = None,
    modules: Modules | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    epochs: int = 5,
    learning_rate: float | None = None,
    smoothing: float | None = None,
    block_loss: float | None = None,
    null: str | nulls.Null | Mapping[str, nulls.Null] = "init",
    level: float = 0.001,
    targets: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] = (),
    shared_inputs: str | Sequence[str] = (),
    partition: Partition | str = "auto",
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> nn.Module:
    """A reorganized copy of the model, trained on until it consists of exactly k independent blocks.

    Neurons are shared out to blocks, the blocks are fitted by least squares to what the dense layers compute, and the
    model is fine-tuned while weights have to pass a Neyman test whose threshold rises to the null's own. At the end
    `anneal(w, null, level, rule="neyman")` keeps exactly the nonzero weights of every layer and `decompose` finds
    exactly k blocks, jointly through each chain of layers; both are checked. `cx.record(result).options`
    says how (`UpgradedOptions`).

    The learning rate is searched by three trials of two fifths of the epochs on four fifths of the samples, at most
    20,000 of them being read, judged by the loss on the others (without labels: by the distance to the dense model's
    outputs). A trial costs a third of the training, so the search costs as much as the training itself, less for more
    data. Below 500 samples or 10 batches the default holds. Where an MLP learns a loss and `partition` is "auto", a
    network with new weights, trained on the same four fifths, first tries both partitions: 1.5 times the training. With
    `held_out`, smoothing, block loss and partition are searched too, one after the other, each trial costing two
    fifths: at most 7, 2.8 times the training. What is given is not searched. `cx.record(result).options.search` has the
    trials, their scores and their cost.

    Scale: ReLU networks can be rescaled neuron by neuron without change of function, which would move weights over any
    bound. Hidden neurons are therefore brought into balanced units first (see `separation/scale.py`) and never rescaled
    afterwards. Parameters with `requires_grad=False` stay as they are, except that layers to separate are fitted.

    Args:
        model: the model; it is not changed.
        blocks: k, for blocks that are made.
        modules: instead of `blocks`, what `discover` found, for blocks along them.
        data: batches that can be gone through again and again, as a `DataLoader`; (inputs, target) where there is a
            loss. Their order follows `seed` where it depends on PyTorch's random numbers.
        held_out: batches that the model was *not* trained on, which judge trials of all knobs. None: a part of `data`
            judges the learning rate alone, because samples that the model has seen speak for whatever changes it least;
            and the partition, by a network with new weights that has not seen it.
        loss: loss(output, target). None: no labels; the model learns to return what the dense one returns.
        smoothing: share of each label that is spread over all classes; for a loss that takes probabilities in place of
            labels, as cross-entropy does. None: 0; with `held_out` 0 and .1 are tried.
        block_loss: weight of a second loss, the mean over blocks of what each alone would lose by a linear readout of
            its own to the whole output. None: 1 for blocks that are made, where there is a loss and one chain of linear
            layers leads to one vector per sample (with `held_out` 0 and 3 are tried too); else 0. Readouts are trained
            along and then thrown away.
        metric: called with the model in evaluation mode before the first step, for what least squares alone gives
            (`UpgradedOptions.start`), and after every epoch, for the history.
        epochs: how often training goes through the data.
        learning_rate: the highest; it rises over the first tenth of the steps and falls to 0. None: .005, .01
            and .02 are tried; .005 where they cannot be.
        null: "init" for what each layer was initialised from (`nulls.for_module`), one null, or a dict by parameter
            name. If the model was trained with weight decay pass the nulls `shrunk` by it.
        level: the strictest level at which nothing is annealed away; larger ones keep everything too.
        targets, ignore: patterns of layer names. By default all layers that share hidden neurons with others: MLPs,
            feed-forward pairs of transformers, stacks of convolutions (blocks of channels); and recurrent networks
            (blocks of hidden units, each reading inputs of its own). Attention, and other layers that stand alone, are
            cut only where they are named; if all layers of an attention are, its heads are shared out as wholes, and
            those of a block are compared, read and written by that block alone. The last layer of a classifier is
            among them; ignore it if every output may read every block, and the first convolution if images have fewer
            channels than there are blocks.
        shared_inputs: patterns of layers that are separated; every block reads all that these read from outside of
            their chain. Blocks are then independent given the inputs: no weight that reads them is cut, and copies of
            inputs count as in "Along modules that exist" (docs/upgrading.md).
        partition: which neuron goes to which block. "regions" keeps inputs together that vary together, "spread" gives
            every block inputs of all kinds; "auto" spreads inputs where an output can read one block only, and where a
            layer that is not separated reads all blocks tries both, or takes regions if they cannot be tried. Hidden
            neurons and outputs of linear layers follow: each goes where most of its variance is explained (see
            `partitioning/assignment.py`). Also "random", or a `Partition`.
        seed: of everything that is drawn at random.
        checkpoint: a folder for the state of the run; called again after an interruption, the run goes on from there to
            the result it would have had. The recipe is in it; a search that was interrupted begins anew.
        progress: bars on standard error; that of the search says what it costs.

    Returns:
        A reorganized model of exactly k blocks, trained.

    Raises:
        InvalidOption: an option outside the values it may take, or a pattern that matches no layer; it names the
            nearest.
        CrystalliteError: blocks were left without weights; the threshold was too much for them.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 8)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> with torch.no_grad():  # as if trained: weights beyond what initialisation draws
        ...     _ = net[0].weight.mul_(4), net[2].weight.mul_(4)
        >>> small = upgrade(net, blocks=2, data=[x], epochs=40)
        >>> options = record(small).options
        >>> options.blocks, len(options.history)
        (2, 40)
    """
    made = partition if isinstance(partition, Partition) and blocks is None else None
    _check((blocks, modules, made), epochs, learning_rate, smoothing, block_loss, level)
    if seed < 0:
        raise InvalidOption(f"seed: expected a whole number from 0 on, got {seed}")
    model, notes = prepared(model, dense=True, finite=True)
    if half := next((name for name, p in model.named_parameters() if p.dtype == torch.float16), None):
        raise InvalidOption(
            f"{half}: expected weights in float32 or bfloat16, got float16, in which steps of training get lost; pass "
            "model.float() or model.bfloat16(), and convert the result"
        )
    data, held_out = repeatable(data), repeatable(held_out)
    with torch.random.fork_rng(devices=[]):  # whoever calls keeps their random numbers
        torch.manual_seed(seed)
        batch, some = next(batches(data)), []
        example = batch.arguments
        dense, turned = turn_conv1d_(copy.deepcopy(model).eval())
        modes: Sequence[Mode] = ("evaluation",) if loss is None else ("evaluation", "training")  # that it runs in

        def cut(one: nn.Module, some: Sequence[Batch]) -> dict[str, Partition]:
            assert isinstance(partition, str)
            several = held_out is not None or (loss is not None and len(chains) == 1 and can_stand_in(one))
            found = candidate_partitions(partition, one, chains, blocks, some, seed, several)
            return _sharing(found, _patterns(shared_inputs))

        if isinstance(partition, str):
            asked = None if targets is None else _patterns(targets)
            with phase("tracing", progress):
                chains = find_chains(dense, asked, _patterns(ignore), example, modes, heads=asked is not None)
            if modules is not None:
                found = {"modules": module_partition(modules, dense, chains, batch)}
                partitions = _sharing(found, _patterns(shared_inputs))
            else:
                some = _some(data, chains, blocks or 1)
                partitions = cut(dense, some)
        elif blocks is not None and partition.blocks != blocks:
            raise InvalidOption(f"blocks: expected {partition.blocks}, as the partition has, got {blocks}")
        else:
            partitions = _sharing({"given": partition}, _patterns(shared_inputs))
        first = next(iter(partitions.values()))  # they differ in labels alone
        for each in partitions.values():
            _check_copies(dense, each)
        initial = _initial(model)
        chosen = {parameter(name): _chosen(null, parameter(name), initial) for name in first.layers}
        thresholds = {name: chosen[parameter(name)].threshold(level) for name in first.layers}
        groups = neuron_groups(dense, trace(dense, example, modes)).values()
        few = batch.first(-(-_POSITIONS * batch.size // count_positions(batch)))
        balanced = balance_(dense, groups, initial | chosen, lambda: few.call(dense))  # the same function
        some = some or _some(data, first.chains, first.blocks)
        task = Task(dense, partitions, thresholds, ends_of(dense, first.chains, batch), loss, some, seed)
        readable = loss is not None and readouts_for(dense, first, batch) is not None
        if block_loss and not readable:
            raise InvalidOption("block_loss: needs a loss, and one chain of linear layers that leads to a vector each")
        logits = smoothing != 0 and _logits(loss, dense, batch)
        if smoothing and not logits:
            raise InvalidOption("smoothing: needs labels, and a loss that takes probabilities too, as cross-entropy")
        made_blocks = "modules" not in partitions and "given" not in partitions
        several = 1 if held_out is None else None  # what the model has seen cannot judge how much it should forget
        choices = Choices(
            tuple(partitions) if held_out is not None or readable else tuple(partitions)[:1],
            _RATES if learning_rate is None else (learning_rate,),
            (_SMOOTHINGS if logits else (0.0,))[:several] if smoothing is None else (smoothing,),
            (_BLOCK_LOSSES if readable and made_blocks else (0.0,))[:several] if block_loss is None else (block_loss,),
        )
        checkpoints, saved = None, None
        if checkpoint is not None:
            run_identity = {
                "model": source_sha256(model), "partition": [_fingerprint(one) for one in partitions.values()],
                "level": level, "seed": seed, "nulls": {name: repr(value) for name, value in chosen.items()},
                "epochs": epochs, "choices": asdict(choices), "loss": loss is not None,
            }  # fmt: skip
            checkpoints = Checkpoints(checkpoint, run_identity)
            saved = checkpoints.latest()
        if saved is None:
            by_stand_in = None
            if held_out is None and len(choices.partition) > 1:
                name, by_stand_in = choose_partition(task, cut, choices, data, epochs, logits, progress)
                choices = replace(choices, partition=(name,))
            with phase("fitting", progress):
                task.fit(choices.partition[0])
            recipe, search = find_recipe(task, choices, data, held_out, epochs, logits, progress)
            search = replace(search, partition=by_stand_in)
        else:
            recipe, search = _searched(saved, checkpoint)
        student, history, start = task.train(
            recipe, data, epochs, fitted=saved is None, metric=metric,
            state={"recipe": to_plain(Recipe, recipe), "search": to_plain(RecipeSearch, search)},
            checkpoints=checkpoints, progress=progress,
        )  # fmt: skip
    partition = partitions[recipe.partition]
    for name in partition.layers:
        student = harden_(student, name)
    clear_idle_(student, partition.modules)
    strays = drop_strays_(student, partition)
    prove(student, partition, chosen, level)
    student = turn_back_(student, turned)
    student.train(model.training)
    student, _ = prepared(student)  # without states that modules have kept with their graph
    shared = {name: labels for name in partition.layers if (labels := partition.row_labels(name)) is not None}
    small = in_blocks(student, partition.modules, example, shared)
    options = UpgradedOptions(
        partition.blocks,
        tuple(chain.layers for chain in partition.chains),
        tuple({group: tuple(own.tolist()) for group, own in labels.items()} for labels in partition.labels),
        {name: own for name, own in chosen.items() if isinstance(own, StorableNull)},
        level,
        thresholds,
        recipe,
        search,
        tuple(history),
        tuple(balanced),
        strays,
        tuple({group: tuple(map(_indices, own)) for group, own in copies.items()} for copies in partition.copies),
        start,
    )
    set_record_(small, replace(record(small), options=options, prepared=notes))
    note_call_(small, [example])
    write_config(small, model)
    return small


def _patterns(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _check(
    given: Sequence[Any], epochs: int, learning_rate: float | None, smoothing: float | None, block_loss: float | None,
    level: float,
) -> None:  # fmt: skip
    if sum(one is not None for one in given) != 1:
        raise InvalidOption("expected one of blocks=k, modules=what discover found, and a Partition")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InvalidOption(f"epochs must be an integer of at least 1, got {epochs!r}")
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise InvalidOption(f"learning_rate must be a positive number, got {learning_rate!r}")
    if smoothing is not None and not 0 <= smoothing < 1:
        raise InvalidOption(f"smoothing must be a number from 0 to less than 1, got {smoothing!r}")
    if block_loss is not None and not 0 <= block_loss < float("inf"):
        raise InvalidOption(f"block_loss must be a number of at least 0, got {block_loss!r}")
    if not 0 < level < 1:
        raise InvalidOption(f"level must be a number between 0 and 1, got {level!r}")


def _sharing(partitions: dict[str, Partition], patterns: list[str]) -> dict[str, Partition]:
    """The same partitions with the inputs of some layers read by every block."""
    if not patterns:
        return partitions
    readers = matching(next(iter(partitions.values())).layers, patterns, (), "shared_inputs")
    return {name: sharing_inputs(one, readers) for name, one in partitions.items()}


def _check_copies(model: nn.Module, partition: Partition) -> None:
    for name in partition.layers:
        layer = model.get_submodule(owner(name)[0])
        if type(layer) is not nn.Linear and partition.row_labels(name) is not None:
            raise InvalidOption(
                f"{name}: expected a linear layer where blocks read copies of inputs, got {type(layer).__name__}; "
                "pass a Partition without copies for its chain"
            )


def _initial(model: nn.Module) -> dict[str, nulls.Null]:
    found = nulls.for_module(model)
    return found if isinstance(found, dict) else {"weight": found}


def _chosen(null: Any, parameter: str, initial: Mapping[str, nulls.Null]) -> nulls.Null:
    found = initial if null == "init" else null
    if isinstance(found, Mapping):
        if parameter not in found:
            raise InvalidOption(f"no null for {parameter}; the mapping has {', '.join(found) or 'no names'}")
        found = found[parameter]
    if not isinstance(found, nulls.Null):
        raise InvalidOption(f'{parameter}: null must be "init", a null from crystallite.nulls or a dict, got {null!r}')
    return found


def _some(data: Any, chains: Sequence[Chain], blocks: int) -> list[Batch]:
    """The first batches, enough for least squares."""
    widest = max(size for chain in chains for size in chain.sizes.values())
    wanted, found, samples = max(_SAMPLES, 4 * -(-widest // blocks)), [], 0
    for batch in batches(data):
        samples += count_positions(batch)
        found.append(batch)
        if samples >= wanted:
            break
    return found


def _logits(loss: Loss | None, model: nn.Module, batch: Batch) -> bool:
    """Whether the model's outputs are what labels of classes are compared with, by a loss that takes probabilities."""
    if loss is None or batch.target is None:
        return False
    with torch.no_grad():
        output = batch.call(model)
    return takes_probabilities(loss, output, batch.target.to(output.device))


def _searched(saved: State, source: Any) -> tuple[Recipe, RecipeSearch]:
    """What a run had chosen before it was interrupted."""
    try:
        recipe, found = (saved.record[name] for name in ("recipe", "search"))
        return from_plain(Recipe, recipe, "recipe"), from_plain(RecipeSearch, found, "search")
    except (CrystalliteError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: expected the recipe of a run, got {error!s:.200}") from None


def _indices(chosen: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(chosen).tolist())


def _fingerprint(partition: Partition) -> str:
    digest = hashlib.sha256(repr(partition.chains).encode())
    for labels in (*partition.labels, *partition.copies):
        for name in sorted(labels):
            digest.update(np.ascontiguousarray(labels[name], np.int64).tobytes())
    return digest.hexdigest()
