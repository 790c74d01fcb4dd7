"""A server of sentence embeddings as one writes it by hand: FastAPI, a tokenizer, one call of the model per request.

`python -m benchmarks.plain_server FOLDER PORT`: what `benchmarks.serving_models` compares the service with. Requests
run on the threads that FastAPI keeps for functions that are not asynchronous, so that all cores are used.
"""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import crystallite  # noqa: F401 (reads folders of ours through from_pretrained)

_LONGEST = 256  # tokens, as the model's files say


class Texts(BaseModel):
    texts: list[str]


def server(folder: str) -> FastAPI:
    """The application."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    app = FastAPI()

    @app.post("/embed")
    def embed(given: Texts) -> dict:
        batch = tokenizer(given.texts, padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt")
        with torch.inference_mode():
            states = model(**batch).last_hidden_state
            mask = batch["attention_mask"][:, :, None]
            found = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        return {"embeddings": found.tolist()}

    return app


if __name__ == "__main__":
    uvicorn.run(server(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), access_log=False, log_level="warning")
