"""Both pseudo-codes of the paper (sections 7.4 and 8.4), transcribed step by step with numpy and counted from 1.

Nothing is taken from the package, and nothing is made faster: it is what the package is compared with.
"""

import math

import numpy as np


def boolean_product(a, b):
    return (a.astype(int) @ b.astype(int)) > 0


def _closure(a):
    n = len(a)
    result = a | np.eye(n, dtype=bool)
    for _ in range(math.ceil(math.log2(n - 1)) if n > 2 else 0):  # ⌈log₂(n − 1)⌉ is −∞ and 0 for n = 1, 2
        result = boolean_product(result, result)
    return result


def bipartite(m):
    """Tables Y and X ⟨Index, SubGroup, NewIndex⟩ in the order of NewIndex."""
    rows, cols = m.shape
    y_group, x_group = np.zeros(rows, int), np.zeros(cols, int)
    b_y = _closure(boolean_product(m, m.T))  # steps 4, 5
    sg_index = 1
    while (y_group == 0).any():  # step 6
        i = int(np.flatnonzero(y_group == 0)[0])
        y_group = y_group + sg_index * b_y[i]
        sg_index += 1
    k = sg_index - 1
    r_y = np.zeros((k, rows), bool)  # steps 7, 8
    for p in range(rows):
        r_y[y_group[p] - 1, p] = True
    d_y = boolean_product(r_y, m)  # step 9
    for s in range(1, k + 1):  # step 10
        if d_y[s - 1].any():
            x_group = x_group + s * d_y[s - 1]
        else:
            y_group[y_group == s] = k + 1
    x_group[x_group == 0] = k + 1  # step 11
    tables = []
    for group in (y_group, x_group):  # steps 12, 13
        order = np.argsort(group, kind="stable")
        tables.append(np.column_stack([order + 1, group[order], np.arange(1, len(group) + 1)]))
    return (*tables, d_y)


def directed(m):
    """Table V ⟨Index, S_TAG, G_TAG, L_TAG, I_TAG, NewIndex⟩ in the order of NewIndex, and M_C."""
    n = len(m)
    m_star = _closure(m)  # step 5
    b = m_star & m_star.T
    s_tag = np.zeros(n, int)
    undo, t_scc = set(range(n)), 1
    while undo:  # step 7
        members = np.flatnonzero(b[min(undo)])
        s_tag[members] = t_scc
        undo -= set(members.tolist())
        t_scc += 1
    k = int(s_tag.max())  # step 8
    g_tag, l_tag, i_tag = np.ones(n, int), np.ones(n, int), np.zeros(n, int)
    m_c = np.zeros((k, k), bool)
    if k != 1:
        r_c = np.zeros((k, n), bool)
        r_c[s_tag - 1, np.arange(n)] = True
        m_c = boolean_product(boolean_product(r_c, m), r_c.T) & ~np.eye(k, dtype=bool)
        done, layer = set(), 1
        while done != set(range(k)):  # step 9
            left = np.array([i not in done for i in range(k)])
            y = boolean_product(m_c & left[:, None] & left[None, :], np.ones((k, 1), bool))[:, 0]
            current = {i for i in range(k) if i not in done and not y[i]}
            l_tag[np.isin(s_tag - 1, list(current))] = layer
            done |= current
            layer += 1
        b_c = _closure(m_c | m_c.T)  # step 10
        undo, g = set(range(k)), 1
        while undo:
            members = np.flatnonzero(b_c[min(undo)])
            g_tag[np.isin(s_tag - 1, members)] = g
            undo -= set(members.tolist())
            g += 1
        for g in np.unique(g_tag):  # step 11
            if (g_tag == g).sum() == 1:
                i_tag[g_tag == g] = 1
    order = np.lexsort((s_tag, l_tag, i_tag, g_tag))  # step 12
    columns = [order + 1, *(tag[order] for tag in (s_tag, g_tag, l_tag, i_tag)), np.arange(1, n + 1)]
    return np.column_stack(columns), m_c
