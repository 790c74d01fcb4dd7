"""Opens saved folders in a process of its own: what is not in the folder is not there.

python -m tests.zoo.reopening RESULTS FOLDER …   one JSON line for each folder
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch


def reopened(expected: Path) -> dict[str, Any]:
    """Whether the folder beside a file of expected answers gives them."""
    import crystallite as cx
    from tests.zoo.cases import Wrong, answers, deviation
    from tests.zoo.verbs import generated

    stored = torch.load(expected, weights_only=False)
    folder = expected.with_suffix("")
    if stored["transformers"]:
        import transformers

        config = json.loads((folder / "config.json").read_text())
        model, problems = getattr(transformers, config["architectures"][0]).from_pretrained(
            folder, output_loading_info=True, dtype="auto"
        )
        if wrong := {name: sorted(map(str, value))[:3] for name, value in problems.items() if value}:
            raise Wrong(f"from_pretrained reports {wrong}")
    else:
        from tests.zoo.models import ZOO

        entry = ZOO[stored["model"]]
        model = cx.load(folder, into=entry.model() if entry.own_code else None)
    model.eval()
    own = deviation(answers(model, stored["batch"]), stored["answers"])
    if own > 1e-4:
        raise Wrong(f"outputs deviate by {own:.2g}")
    result: dict[str, Any] = {"deviation": own}
    tokens = expected.parent / "tokens.pt"
    if tokens.exists() and (written := torch.load(tokens))["verb"] == expected.stem.removeprefix("fresh-"):
        result["tokens"] = torch.equal(generated(model, stored["batch"], True), written["tokens"])
    return result


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = Path(sys.argv[1])
    for name in sys.argv[2:]:
        line: dict[str, Any] = {"file": name}
        try:
            line |= {"status": "works", **reopened(Path(name))}
        except Exception as error:
            from crystallite import CrystalliteError
            from tests.zoo.cases import Wrong, plain_text, where

            status = (
                "wrong" if isinstance(error, Wrong) else "refused" if isinstance(error, CrystalliteError) else "crash"
            )
            text = plain_text(error) if status != "crash" else f"{type(error).__name__}: {plain_text(error)}"
            line |= {"status": status, "text": text, "frames": where(error)}
            traceback.print_exc(limit=3)
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
