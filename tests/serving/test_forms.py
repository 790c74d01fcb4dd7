"""Every form of the paper: cut where a hop costs nothing, whole where it costs too much, and the same answers."""

import asyncio
import dataclasses
import functools
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from benchmarks.serving_forms import FORMS, save_form

import crystallite as cx
from crystallite.core.errors import CheckpointError
from crystallite.models.manifest import source_sha256
from crystallite.serving import Limits, Refusal, Service
from crystallite.serving.cuts.site import nbytes
from crystallite.serving.engine import LocalEngine, Unreachable
from crystallite.serving.interface import NamedModel
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, Source
from crystallite.serving.piece import open_piece
from crystallite.serving.transform import Transform
from tests.helpers.artifacts import TOGETHER
from tests.helpers.cuts import FREE
from tests.helpers.tolerance import assert_close

INSIDE = ["encoder", "GRU", "convolution", "BERT", "Mixtral"]  # whose own code runs in the transform tier


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """By the name of a form: the model, what is served of it, and what it is cut into."""

    @functools.cache
    def made(name):
        if name in ("BERT", "Mixtral"):
            pytest.importorskip("transformers")
        folder = save_form(name, tmp_path_factory.mktemp("forms") / "small")
        model = FORMS[name].build()
        source = Source(folder, model if FORMS[name].own_code else None, machine=FREE)
        return model, source, CutModel.open("small", source)

    return made


@torch.no_grad()
def expected(model, given):
    return NamedModel(model, ("input",))(given)


def assert_answers(found, wanted):
    found = found if isinstance(found, dict) else {"output": found}
    for name, y in wanted.items():
        assert_close(found.get(name, found.get("output")), y)


@pytest.mark.parametrize("name", FORMS)
def test_cut_or_whole_it_answers_as_the_model(served, name):
    model, source, _ = served(name)
    given = FORMS[name].inputs(5)
    for machine, pieces in ((FREE, FORMS[name].pieces), (TOGETHER, 1)):
        with Service.load(source.path, into=source.into, machine=machine) as service:
            plan = service.models["small"].plan
            assert len(plan.pieces) == pieces
            assert_answers(service.infer(given), expected(model, given))
            text = service.metrics.text({})
        called = set(re.findall(r'piece_seconds_count\{model="small",piece="(.*?)"\}', text))
        assert called == {piece.name for piece in plan.pieces}


@pytest.mark.parametrize("name", FORMS)
def test_a_piece_opened_alone_holds_its_own_bytes(served, name):
    _, source, cut = served(name)
    for piece in cut.plan.pieces:
        opened = open_piece(source.path, piece, source.into)
        assert source_sha256(opened) == source_sha256(cut.network.modules[piece.name])
        assert nbytes(opened) == piece.nbytes


@pytest.mark.parametrize("name", INSIDE)
def test_the_transform_tier_holds_what_was_not_cut_and_nothing_else(served, name):
    _, source, cut = served(name)
    operators = {piece.modules[0] for piece in cut.plan.pieces}
    whole = {n for n, _ in cx.load(source.path, source.into).named_parameters()}
    uncut = {n for n in whole if not any(n.startswith(f"{operator}.") for operator in operators)}
    (step,) = cut.without_pieces().network.steps
    assert {n.removeprefix("model.") for n, _ in step.module.model.named_parameters()} == {
        n.removeprefix("model.") for n in uncut
    }
    assert len(uncut) < len(whole)


@pytest.mark.parametrize("name", INSIDE)
def test_another_process_opens_the_transform_tier_from_the_folder(served, name):
    model, source, cut = served(name)
    hollow = pickle.loads(pickle.dumps(cut.without_weights()))
    assert [step.module for step in hollow.network.steps] == [None]
    assert not hollow.network.modules
    network = dataclasses.replace(hollow.reopened(source.into).network, modules=cut.network.modules)
    given = FORMS[name].inputs(2)
    assert_answers(network(given), expected(model, given))
    with pytest.raises(CheckpointError, match="not those that were planned with"):
        dataclasses.replace(hollow, sha256="0").reopened(source.into)


class Flaky:
    """An engine that loses some calls of some pieces."""

    def __init__(self, modules, losses, error):
        self.engine, self.losses, self.error = LocalEngine(modules), dict(losses), error

    async def run(self, piece, given):
        if self.losses.get(piece, 0):
            self.losses[piece] -= 1
            raise self.error
        return await self.engine.run(piece, given)


def run_flaky(cut, losses, error, given):
    metrics = Metrics()

    async def scenario():
        engine = Flaky(cut.network.modules, losses, error)
        transform = Transform("small", cut.without_pieces().network, engine, Limits(attempts=3), metrics)
        try:
            return await transform.run(given), metrics
        except Refusal as refusal:
            return refusal, metrics
        finally:
            await transform.close()
            await engine.engine.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("error", [ConnectionError("replica died"), Unreachable("no replica")])
@pytest.mark.parametrize("name", FORMS)
def test_lost_calls_are_repeated(served, name, error):
    model, _, cut = served(name)
    given, lost = FORMS[name].inputs(3), cut.plan.pieces[1].name
    found, metrics = run_flaky(cut, {lost: 2}, error, given)
    assert_answers(found, expected(model, given))
    assert f'crystallite_retries_total{{model="small",piece="{lost}"}} 2' in metrics.text({})


@pytest.mark.parametrize("name", FORMS)
def test_a_piece_that_stays_lost_is_named(served, name):
    _, _, cut = served(name)
    lost = cut.plan.pieces[-1].name
    refusal, _ = run_flaky(cut, {lost: 99}, ConnectionError("replica died"), FORMS[name].inputs(3))
    assert refusal.status == 503
    assert str(refusal).startswith(f"piece {lost} of small failed 3 times")


def test_streams_of_many_clients_keep_their_states(served):
    model, source, _ = served("GRU")
    steps = torch.randn(8, 15, 12)
    with Service.load(source.path, into=source.into, machine=FREE) as service:

        def stream(client):
            state, heard = torch.zeros(1, 99), []
            for part in steps[client][None].split(5, 1):
                answer = service.infer(steps=part, state=state)
                heard.append(answer["output"])
                state = answer["last"]
            return torch.cat(heard, 1), state

        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(stream, range(8)))
    whole = expected(model, {"steps": steps, "state": torch.zeros(8, 99)})
    assert_close(torch.cat([output for output, _ in found]), whole["output"])
    assert_close(torch.cat([last for _, last in found]), whole["last"])
