"""Decoders compressed layer by layer: what a stream of hidden states shows of each layer is all that is needed.

`stack.py` runs a decoder as embeddings, layers and head; `layer_parts.py` says what may go from a layer;
`sensitivity.py` carries gradients backwards once and measures what each size would cost; `share_out.py` divides the
budget; `token_tables.py` gives embeddings and head a low rank, if asked for; `layer_fit.py` fits one layer after the
other to the dense stream; `run.py` does all of it; `polish.py` trains the result a little.
"""
