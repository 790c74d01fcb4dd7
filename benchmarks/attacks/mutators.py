"""Ways to damage bytes, JSON values and tensors, each driven by a generator of random numbers alone."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from crystallite.core.errors import CrystalliteError
from crystallite.models.manifest import MANIFEST, WEIGHTS, weights_sha256, write_manifest

__all__ = ["mutate_artifact", "mutate_bytes", "mutate_json"]

_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    16,
    255,
    4096,
    65_535,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
_BYTES = (0, 1, 0x7F, 0x80, 0xFF, 0x2E, 0x5B, 0x7B, 0x7D)
_PAYLOADS = (
    b"cposix\nsystem\n(X\x07\x00\x00\x00exit 99tR.",
    b"c__builtin__\neval\n(X\x04\x00\x00\x00a()btR.",
    b"\x80\x04N.",
)
_VALUES: tuple[Any, ...] = (
    0, -1, 1, 2, 5, 17, 1000, 10**5, 2**31, 2**63, -(2**63), 10**30, 0.5, -1e308, 1e308, True, False, None, "",
    "x", "0 1", "x" * 5000, "os.system", "cpu", "float64", [], {}, [0], [[1, 2, 3]], [[[[]]]],
    {"type": "Linear"}, {"a": {"a": {}}},
)  # fmt: skip


def mutate_bytes(rng: np.random.Generator, sound: bytes) -> bytes:
    """One to four of: bits flipped, bytes and numbers overwritten, parts cut out, doubled, moved or put in."""
    data = bytearray(sound)
    for _ in range(int(rng.integers(1, 5))):
        if not data:
            break
        at = _place(rng, len(data))
        match int(rng.integers(9)):
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at] = int(rng.choice(_BYTES))
            case 2:
                size, value = int(rng.choice([2, 4, 8])), int(_NUMBERS[rng.integers(len(_NUMBERS))])
                data[at : at + size] = struct.pack("<Q", value)[:size][: len(data) - at]
            case 3:
                del data[at:]
            case 4:
                del data[at : at + int(rng.integers(1, 32))]
            case 5:
                data[at:at] = data[at : at + int(rng.integers(1, 64))] * int(rng.choice([1, 1, 2, 30]))
            case 6:
                data[at:at] = rng.bytes(int(rng.integers(1, 16)))
            case 7:
                other = _place(rng, len(data))
                data[at : at + 16] = data[other : other + 16]
            case _:
                data[at:at] = _PAYLOADS[rng.integers(len(_PAYLOADS))]
    return bytes(data)


def _place(rng: np.random.Generator, size: int) -> int:
    """Anywhere, but every second time near an end, where headers and directories are."""
    reach = size if rng.random() < 0.5 else min(size, 200)
    at = int(rng.integers(reach))
    return at if rng.random() < 0.5 else size - 1 - at


def mutate_json(rng: np.random.Generator, value: Any) -> Any:
    """The value with one to three of its parts replaced, removed, repeated, changed a little or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(int(rng.integers(1, 4))):
        places = list(_places(value))
        if not places:
            break
        holder, key = places[rng.integers(len(places))]
        try:
            _change(rng, holder, key, places)
        except (KeyError, IndexError):  # an exchange may have moved it
            continue
    return value


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def _change(rng: np.random.Generator, holder: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    now = holder[key]
    match int(rng.integers(6)):
        case 0:
            holder[key] = copy.deepcopy(_VALUES[rng.integers(len(_VALUES))])
        case 1:
            del holder[key]
        case 2 if isinstance(now, bool):
            holder[key] = not now
        case 2 | 3 if isinstance(now, (int, float)):
            holder[key] = now + int(rng.integers(-4, 5))
        case 4 if isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(now)] * int(rng.choice([1, 3, 40]))
        case _:
            other, place = places[rng.integers(len(places))]
            holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(now)


def _mutate_tensors(rng: np.random.Generator, state: dict[str, Tensor]) -> None:
    """Index tables inside or just outside their bounds, numbers that are none, other shapes and kinds."""
    tables = [name for name, value in state.items() if not value.is_floating_point() and value.numel()]
    for _ in range(int(rng.integers(1, 4))):
        pool = tables if tables and rng.random() < 0.8 else [*state]
        name = pool[rng.integers(len(pool))]
        value = state[name] = state[name].clone()
        flat = value.view(-1)
        if not value.numel():
            continue
        at, other = (int(i) for i in rng.integers(value.numel(), size=2))
        match int(rng.integers(8)):
            case 0 | 1 if value.is_floating_point():
                flat[at] = float(rng.choice([np.nan, np.inf, -np.inf, 1e38, 0]))
            case 0 | 1 | 2 | 3:
                flat[at] = int(rng.integers(-1, int(flat.double().nan_to_num(0, 9, 9).clamp(-9, 99).max()) + 3))
            case 4:
                flat[at], flat[other] = flat[other].clone(), flat[at].clone()
            case 5:
                state[name] = value.flip(0).contiguous()
            case 6:
                state[name] = value.to([torch.float64, torch.float16, torch.int32, torch.int64][rng.integers(4)])
            case _:
                state[name] = flat[: max(1, at)].clone()


def mutate_artifact(rng: np.random.Generator, folder: Path) -> None:
    """Damage a saved model in place; three times of four sign it again, as somebody would who wants it believed."""
    way = rng.random()
    manifest = json.loads((folder / MANIFEST).read_text())
    if way < 0.25:
        victims = sorted(path for path in folder.iterdir() if path.is_file())
        victim = victims[rng.integers(len(victims))]
        victim.write_bytes(mutate_bytes(rng, victim.read_bytes()))
        return
    if way < 0.65:
        parts = manifest["modules"] if rng.random() < 0.7 else manifest
        changed = mutate_json(rng, parts)
        manifest = changed if parts is manifest else manifest | {"modules": changed}
    elif way < 0.9:
        state = load_file(folder / WEIGHTS)
        _mutate_tensors(rng, state)
        save_file(state, folder / WEIGHTS)
    else:
        (folder / WEIGHTS).write_bytes(mutate_bytes(rng, (folder / WEIGHTS).read_bytes()))
    if isinstance(manifest, dict) and isinstance(manifest.get("weights_sha256"), str):
        manifest["weights_sha256"] = weights_sha256(folder)
    try:
        write_manifest(folder, manifest)
    except (CrystalliteError, TypeError):  # no longer JSON, or no object
        (folder / MANIFEST).write_text(json.dumps(manifest, default=str))
