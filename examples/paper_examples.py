"""Both worked examples of the paper: the blocks of a feed-forward matrix, and the Frobenius form of a feedback network.

python examples/paper_examples.py                      `crystallite demo --paper` prints all tables beside the paper's
"""

import numpy as np

import crystallite as cx
from crystallite.demo.paper import printed_tables


def main():
    tables = {name: np.array(table.values) for name, table in printed_tables().items()}  # as the paper prints them

    w = tables["M'"]  # the feed-forward example: three blocks, rows and columns in no order
    blocks = cx.decompose(w)
    print(blocks)
    print(blocks.apply(w))  # PWQᵀ: the blocks on its diagonal, the zero block last
    assert np.array_equal(blocks.apply(w), blocks.P @ w @ blocks.Q.T)
    assert np.array_equal(blocks.P.source + 1, tables["P_2"])  # the paper's own permutation

    a = tables["A"]  # the feedback example: an edge from j to i in row i and column j
    feedback = cx.decompose(a, kind="directed")
    print("\n", feedback, sep="")
    print(feedback.table())  # new number, old number, component, layer …: the paper's table V
    assert np.array_equal(feedback.table(), tables["V"])


if __name__ == "__main__":
    main()
