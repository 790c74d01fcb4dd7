"""BlockRecurrent against the masked dense module: before, after, undone, saved and reloaded; both ways to run."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import crystallite as cx
from crystallite import CrystalliteError, InvalidMatrix, InvalidOption
from crystallite.core.compiling import COMPILES, njit
from crystallite.operators import recurrent_layer
from crystallite.operators.frobenius import frobenius_form
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.operators.runtime import functions
from tests.helpers.planted.recurrent import HIDDEN, INPUT, MODES, STRUCTURES, edges, flat, planted
from tests.helpers.tolerance import assert_close


@pytest.fixture(autouse=True)
def one_thread():
    """Small products gain nothing from threads, and wait for them where the machine has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact(dense, masks=None, smallest=1):
    """The blocks as they are: small ones do not share one unless asked to."""
    return BlockRecurrent.from_dense(dense, masks, smallest)


def assert_same(found, expected):
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert_close(a, b)


def compiled(module, *given):
    with torch.no_grad():
        return module(*given)


def states(module, *shape):
    drawn = [torch.randn(*shape, dtype=module.weight_hh_l0.dtype) for _ in range(1 + (module.mode == "LSTM"))]
    return tuple(drawn) if len(drawn) > 1 else drawn[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("mode", MODES)
def test_same_outputs_and_states(mode, structure, dtype):
    dense = planted(mode, structure, dtype=dtype)
    for smallest, batch in ((1, 1), (1, 6), (6, 6)):
        blocks = exact(dense, smallest=smallest)
        x, initial = torch.randn(9, batch, INPUT, dtype=dtype), states(dense, 1, batch, HIDDEN)
        for arguments in ((x,), (x, initial)):
            expected = dense(*arguments)
            assert_same(blocks(*arguments), expected)
            assert_same(compiled(blocks, *arguments), expected)


@pytest.mark.parametrize("structure", ["independent", "triangular", "random"])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, True), (2, False), (3, True)])
@pytest.mark.parametrize("mode", MODES)
def test_layers_and_directions(mode, layers, bidirectional, structure):
    dense = planted(mode, structure, layers, bidirectional, batch_first=True)
    blocks = exact(dense)
    x = torch.randn(5, 8, INPUT, dtype=torch.float64)
    initial = states(dense, layers * (1 + bidirectional), 5, HIDDEN)
    assert_same(blocks(x, initial), dense(x, initial))
    assert_same(compiled(blocks, x, initial), dense(x, initial))
    assert_same(compiled(blocks, x[:0]), dense(x[:0]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", ["independent", "triangular", "isolated"])
@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences(mode, structure, bias):
    dense = planted(mode, structure, 2, True, bias=bias)
    blocks = exact(dense)
    x, initial = torch.randn(9, 6, INPUT, dtype=torch.float64), states(dense, 4, 6, HIDDEN)
    for lengths, is_sorted in (([9, 7, 7, 4, 2, 1], True), ([3, 9, 1, 6, 6, 2], False)):
        packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=is_sorted)
        for arguments in ((packed,), (packed, initial)):
            expected = dense(*arguments)
            for found in (blocks(*arguments), compiled(blocks, *arguments)):
                assert_same(found, expected)
                assert torch.equal(pad_packed_sequence(found[0])[1], torch.tensor(lengths))


@pytest.mark.parametrize("mode", MODES)
def test_one_sequence_without_batch(mode):
    dense = planted(mode, "triangular", 2, True, batch_first=True)
    blocks = exact(dense)
    x, initial = torch.randn(9, INPUT, dtype=torch.float64), states(dense, 4, HIDDEN)
    for run in (blocks, lambda *given: compiled(blocks, *given)):
        assert_same(run(x), dense(x))
        assert_same(run(x, initial), dense(x, initial))


@pytest.mark.parametrize("smallest", [1, 6])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("mode", MODES)
def test_same_gradients(mode, structure, smallest):
    dense = planted(mode, structure, 2, True)
    blocks = exact(dense, smallest=smallest)
    inputs = [torch.randn(7, 4, INPUT, dtype=torch.float64).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    for module, x in zip((dense, blocks), inputs, strict=True):
        torch.manual_seed(1)
        sum((part * torch.randn_like(part)).sum() for part in flat(module(x))).backward()
    assert_close(inputs[1].grad, inputs[0].grad)
    by_name, inside = gradients(blocks).dense_weights(), filled(blocks).dense_weights()
    for name, weight in dense.named_parameters():
        assert_close(by_name[name], weight.grad * inside[name])  # the gradient, cut to the blocks
        assert ((weight != 0) <= (inside[name] != 0)).all()


def gradients(module):
    """The module with gradients in place of its parameters."""
    result = copy.deepcopy(module)
    for mine, theirs in zip(result.parameters(), module.parameters(), strict=True):
        mine.data = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
    return result


def filled(module):
    """The module with ones in all its blocks."""
    result = copy.deepcopy(module)
    for parameter in result.parameters():
        parameter.data.fill_(1)
    return result


@pytest.mark.parametrize("mode", ["GRU", "LSTM"])
def test_gradcheck(mode):
    cls = {"GRU": nn.GRU, "LSTM": nn.LSTM}[mode]
    dense = cls(2, 4, dtype=torch.float64)
    hears = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    blocks = exact(dense, {"weight_hh_l0": hears.repeat(len(dense.weight_hh_l0) // 4, 1)})
    named = [(name, p) for name, p in blocks.named_parameters() if p.numel()]
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(x, *values):
        given = dict(zip([name for name, _ in named], values, strict=True))
        return flat(torch.func.functional_call(blocks, given, (x,)))[0]

    assert torch.autograd.gradcheck(run, (x, *(p for _, p in named)))


@pytest.mark.parametrize("smallest", [1, 6, 32])
@pytest.mark.parametrize("structure", ["triangular", "ragged", "random", "chain"])
def test_training_keeps_the_structure(structure, smallest):
    dense = planted("LSTM", structure)
    blocks = exact(dense, smallest=smallest)
    before = cx.decompose(dense.weight_hh_l0.view(4, HIDDEN, HIDDEN).any(0), kind="directed")
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=0.01)
    x = torch.randn(6, 3, INPUT, dtype=torch.float64)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(blocks(x)[0].square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    trained = blocks.to_dense()
    after = cx.decompose(trained.weight_hh_l0.view(4, HIDDEN, HIDDEN).any(0), kind="directed")
    assert np.array_equal(after.scc, before.scc)
    assert np.array_equal(after.component, before.component)
    assert_same(compiled(blocks, x), trained(x))


def test_dropout_falls_on_the_same_units():
    dense = planted("GRU", "independent", 3, True, dropout=0.4)
    blocks = exact(dense)
    x = torch.randn(5, 3, INPUT, dtype=torch.float64)
    for run in (blocks, lambda given: compiled(blocks, given)):
        torch.manual_seed(3)
        expected = dense(x)
        torch.manual_seed(3)
        assert_same(run(x), expected)
    assert_same(blocks.eval()(x), dense.eval()(x))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("mode", MODES)
def test_to_dense_restores_the_weights(mode, structure):
    dense = planted(mode, structure, 2, True, torch.float32, dropout=0.5, batch_first=True)
    for smallest in (1, 6, 32):
        undone = exact(dense, smallest=smallest).to_dense()
        assert type(undone) is type(dense)
        assert repr(undone) == repr(dense)
        for (name, expected), (other, found) in zip(dense.named_parameters(), undone.named_parameters(), strict=True):
            assert name == other
            assert torch.equal(found, expected)


def test_masks_choose_what_is_kept():
    dense = planted("GRU", "one block")
    torch.manual_seed(2)
    masks = {
        "weight_hh_l0": edges("triangular").repeat(3, 1) & (torch.rand(60, 20) < 0.9),  # gates may differ
        "weight_ih_l0": torch.rand(60, 7) < 0.2,
    }
    blocks = exact(dense, masks)
    with torch.no_grad():
        for name, mask in masks.items():
            dense.get_parameter(name).mul_(mask)
    assert all(torch.equal(w, dense.get_parameter(n)) for n, w in blocks.to_dense().named_parameters())
    x = torch.randn(5, 3, INPUT, dtype=torch.float64)
    assert_same(blocks(x), dense(x))
    assert_same(compiled(blocks, x), dense(x))


def test_inputs_fall_into_blocks_too():
    dense = planted("LSTM", "isolated")
    reads = (torch.arange(HIDDEN) % 3)[:, None] == torch.arange(INPUT) % 4  # inputs 3, 7, … are read by nobody
    reads[0] = False  # a unit that reads nothing
    dense.weight_ih_l0.data.mul_(reads.repeat(4, 1))
    blocks = exact(dense)
    assert sorted((i.size, i.columns) for i in blocks.layers[0].form.inputs) == [(6, 2), (6, 2), (7, 2)]
    assert blocks.macs == 4 * int(reads.sum())
    x = torch.randn(5, 3, INPUT, dtype=torch.float64)
    assert_same(blocks(x), dense(x))
    assert_same(compiled(blocks, x), dense(x))


@settings(max_examples=40)
@given(st.integers(1, 12), st.sampled_from(MODES), st.floats(0, 0.5), st.booleans(), st.integers(1, 9), st.integers(0))
def test_any_mask(hidden, mode, density, bidirectional, smallest, seed):
    torch.manual_seed(seed % 2**31)
    options = {"nonlinearity": mode[4:].lower()} if mode.startswith("RNN") else {}
    cls = {"GRU": nn.GRU, "LSTM": nn.LSTM}.get(mode, nn.RNN)
    dense = cls(3, hidden, bidirectional=bidirectional, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, weight in dense.named_parameters():
            if name.startswith("weight"):
                weight.mul_(torch.rand_like(weight) < density)
    blocks = exact(dense, smallest=smallest)
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    assert_same(compiled(blocks, x), dense(x))
    assert_same(blocks(x), dense(x))
    assert all(torch.equal(w, dense.get_parameter(n)) for n, w in blocks.to_dense().named_parameters())


@pytest.mark.parametrize("structure", ["independent", "triangular", "ragged", "chain"])
@pytest.mark.parametrize("mode", ["GRU", "LSTM"])
def test_threads_change_nothing(mode, structure, monkeypatch):
    monkeypatch.setattr(recurrent_layer, "_MACS_PER_THREAD", 1)
    dense = planted(mode, structure, 1, True, torch.float32)
    blocks = exact(dense)
    lengths = torch.randint(1, 40, (30,)).sort(descending=True).values
    packed = pack_padded_sequence(torch.randn(40, 30, INPUT), lengths)
    expected = dense(packed)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_same(compiled(blocks, packed), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_inputs_of_any_strides(threads, monkeypatch):
    monkeypatch.setattr(recurrent_layer, "_MACS_PER_THREAD", 1)
    torch.set_num_threads(threads)
    dense = planted("GRU", "triangular")
    blocks = exact(dense)
    wide = torch.randn(9, 8, 2 * INPUT, dtype=torch.float64, requires_grad=True)
    for x in (wide[..., ::2], wide[..., :INPUT], wide.transpose(0, 1)[..., INPUT:]):
        assert_same(compiled(blocks, x), dense(x))
    packed = PackedSequence(wide[:, 0, ::2], torch.tensor([5, 4]))
    assert_same(compiled(blocks, packed), dense(packed))


def test_state_dict_deepcopy_and_moves():
    dense = planted("LSTM", "triangular", 2)
    blocks = exact(dense)
    x = torch.randn(4, 3, INPUT, dtype=torch.float64)
    other = exact(planted("LSTM", "triangular", 2))
    torch.manual_seed(5)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    other.layers[0].order.copy_(torch.randperm(HIDDEN))
    other.load_state_dict(blocks.state_dict())
    empty = BlockRecurrent("LSTM", INPUT, HIDDEN, [layer.form for layer in blocks.layers], 2, device="meta")
    empty.load_state_dict(blocks.state_dict(), assign=True)
    for twin in (other, empty, copy.deepcopy(blocks)):
        assert all(map(torch.equal, flat(compiled(twin, x)), flat(compiled(blocks, x))))
    single = copy.deepcopy(blocks).float()
    assert_same(compiled(single, x.float()), dense.float()(x.float()))
    assert single.layers[0].order.dtype == torch.int64
    assert single.to("meta").layers[0].order.device.type == "meta"


@pytest.mark.parametrize("mode", ["GRU", "LSTM"])
def test_export(mode):
    dense = planted(mode, "triangular", bidirectional=True)
    x = torch.randn(4, 3, INPUT, dtype=torch.float64)
    exported = torch.export.export(exact(dense), (x,))
    assert_same(exported.module()(x), dense(x))


def test_holds_its_blocks_and_index_tables_only():
    n = 128
    dense = nn.GRU(32, n)
    group = torch.arange(n) // 32
    dense.weight_hh_l0.data.mul_((group[:, None] == group).repeat(3, 1))
    blocks = exact(dense)
    held = sum(p.numel() for p in blocks.parameters())
    assert held == 3 * (4 * 32 * 32 + 32 * n + 2 * n)
    assert sum(b.numel() for b in blocks.buffers()) == 3 * n + 32
    assert (blocks.n_blocks, blocks.macs, blocks.dense_macs) == (4, 3 * (4 * 32 * 32 + 32 * n), 3 * n * (n + 32))


def test_pays():
    def planted_in(cls, hears, smallest=32):
        dense = cls(256, 512)
        dense.weight_hh_l0.data.mul_(hears.repeat(len(dense.weight_hh_l0) // 512, 1))
        return BlockRecurrent.from_dense(dense, smallest=smallest)

    group, chain = torch.arange(512) // 128, torch.ones(512, 512).tril(-1)
    for cls in (nn.GRU, nn.LSTM):
        assert planted_in(cls, group[:, None] == group).is_faster
        assert planted_in(cls, group[:, None] >= group).is_faster
        assert not planted_in(cls, torch.ones(512, 512)).is_faster
        assert planted_in(cls, chain).is_faster
        assert not planted_in(cls, chain, smallest=1).is_faster  # 512 blocks one after the other


def test_frobenius_form():
    hears = np.zeros((7, 7), bool)
    hears[[1, 4], [4, 1]] = True  # a circle of 1 and 4
    hears[[0, 2], 4] = True  # 0 and 2 hear it
    hears[2, 2] = hears[6, 6] = True  # and 2 itself; 6 only itself; 3 and 5 nobody
    form, maps = frobenius_form(hears, np.ones((7, 2), bool), gates=3)
    found = [(maps.order[b.first : b.first + b.size].tolist(), b.depth, b.feedback, b.sources) for b in form.blocks]
    assert found == [([1, 4], 0, 2, 0), ([2], 1, 1, 1), ([0], 1, 0, 1), ([6], 0, 1, 0), ([3, 5], 0, 0, 0)]
    assert maps.order[maps.sources].tolist() == [4, 4]
    assert maps.rank.tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert form.macs == 3 * (7 * 2 + 4 + 2 + 1 + 1)
    assert sorted(form.gate_columns.ravel()) == list(range(21))
    assert form.bins(3) == [(0, 0, 4), (0, 4, 7)]
    form, _ = frobenius_form(hears, np.ones((7, 2), bool), gates=3, smallest=3)
    assert [(b.first, b.size, b.depth, b.feedback, b.sources) for b in form.blocks] == [
        (0, 3, 0, 3, 0),
        (3, 2, 1, 1, 1),
        (5, 2, 0, 0, 0),
    ]
    assert form.bins(1) == [(0, 0, 5), (0, 5, 7)]


@pytest.mark.skipif(not COMPILES, reason="these are compiled: without numba, PyTorch computes them")
@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_activations_to_the_last_places(name, real):
    function = getattr(functions, name)

    @njit
    def apply(values, out):
        for i in range(len(values)):
            out[i] = function(values[i])

    x = np.concatenate([np.linspace(-80, 80, 4001), np.linspace(-1e-3, 1e-3, 501), [np.inf, -np.inf]]).astype(real)
    wide = np.clip(x.astype(np.longdouble), -1e4, 1e4)
    expected = 1 / (1 + np.exp(-wide)) if name == "sigmoid" else np.tanh(wide)
    found = np.empty_like(x)
    apply(x, found)
    assert np.all(np.abs(found - expected) <= 3 * np.finfo(real).eps * np.abs(expected) + np.finfo(real).tiny * 2)
    apply(np.array([np.nan], real), found[:1])
    assert np.isnan(found[0])


def test_nan_reaches_the_output():
    for mode in MODES:
        blocks = exact(planted(mode, "independent"))
        x = torch.zeros(3, 1, INPUT, dtype=torch.float64)
        x[1, 0, 0] = torch.nan
        output, _ = compiled(blocks, x)
        assert not output[0].isnan().any()
        assert output[1:].isnan().all()


def test_errors():
    dense = planted("LSTM", "independent")
    blocks = exact(dense)
    x = torch.randn(4, 3, INPUT, dtype=torch.float64)
    with pytest.raises(InvalidOption, match="proj_size must be 0, got 5"):
        BlockRecurrent.from_dense(nn.LSTM(INPUT, HIDDEN, proj_size=5))
    with pytest.raises(InvalidOption, match=r"expected an nn\.RNN, nn\.GRU or nn\.LSTM, got Linear"):
        BlockRecurrent.from_dense(nn.Linear(2, 2))
    with pytest.raises(InvalidOption, match="got 'weight_hh_l1'"):
        exact(dense, {"weight_hh_l1": dense.weight_hh_l0})
    with pytest.raises(InvalidMatrix, match=r"masks\['weight_hh_l0'\]: expected shape \(80, 20\), got \(20, 20\)"):
        exact(dense, {"weight_hh_l0": torch.ones(20, 20)})
    with pytest.raises(InvalidMatrix, match="the last of 7, got shape"):
        blocks(x[..., :5])
    with pytest.raises(InvalidMatrix, match="expected 2 or 3 dimensions"):
        blocks(x[None])
    with pytest.raises(InvalidMatrix, match="hx: expected 2 states of shape"):
        blocks(x, torch.zeros(1, 3, HIDDEN))
    with pytest.raises(InvalidMatrix, match=r"expected 2 states of shape \(1, 3, 20\), got \(1, 2, 20\), "):
        blocks(x, (torch.zeros(1, 2, HIDDEN), torch.zeros(1, 2, HIDDEN)))
    with pytest.raises(InvalidMatrix, match="at least one time step"):
        blocks(x[:0])
    with pytest.raises(InvalidOption, match="forms: expected 2, got 1"):
        BlockRecurrent("LSTM", INPUT, HIDDEN, [blocks.layers[0].form], 2)
    with pytest.raises(InvalidOption, match="forms: expected 3 gates and 20 units, got 4 and 20"):
        BlockRecurrent("GRU", INPUT, HIDDEN, [blocks.layers[0].form])
    with pytest.raises(InvalidMatrix, match="dtype"):
        blocks(x.float())
    dense.weight_hh_l0.data[0, 0] = torch.inf
    with pytest.raises(CrystalliteError, match="weight_hh_l0: expected finite numbers"):
        exact(dense)
    for table, values in (("order", [HIDDEN]), ("sources", [HIDDEN, HIDDEN + 1]), ("columns", [-1, 0])):
        damaged = exact(planted("LSTM", "triangular"))
        getattr(damaged.layers[0], table)[: len(values)] = torch.tensor(values)
        with pytest.raises((CrystalliteError, IndexError, RuntimeError)):
            compiled(damaged, x)
