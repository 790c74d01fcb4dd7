"""Texts in requests: the folder's tokenizer before the model, embeddings or probabilities behind it."""

import json
import struct

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import crystallite as cx
from crystallite.serving import Limits, Listener, Refusal, Service
from crystallite.serving.grpc_messages import message
from tests.helpers.grpc_client import Code, infer, send
from tests.helpers.http_client import call
from tests.helpers.text_models import SIZES, WORDS, language_model, transformers, word_tokenizer
from tests.helpers.tolerance import assert_close

TEXTS = ["w1 w2 w3", "w4", " ".join(WORDS), "w7 w7 w9 w30 w2 unknown"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense encoder, as transformers wrote it."""
    folder = tmp_path_factory.mktemp("texts") / "encoder"
    language_model(folder, "BertModel")
    return folder


@pytest.fixture(scope="module")
def service(folder):
    with Service.load(folder, unvalidated=True) as service:
        yield service


@pytest.fixture(scope="module")
def listener(service):
    with Listener(service, port=0, grpc_port=0) as listener:
        yield listener


@pytest.fixture
def channel(listener):
    import grpc

    with grpc.insecure_channel(listener.grpc_target) as channel:
        yield channel


def states(folder, texts):
    """What the model makes of texts, and their mask; cut where its positions end."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = word_tokenizer()(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).last_hidden_state, batch["attention_mask"][:, :, None].float()


def embedded(folder, texts):
    found, mask = states(folder, texts)
    return (found * mask).sum(1) / mask.sum(1)


def packed(texts):
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def in_json(texts, **more):
    return {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts, **more}


def post(listener, body, headers=()):
    return call(listener.url, "/v2/models/encoder/infer", body, headers=dict(headers))


def test_embeddings_are_the_mean_of_the_tokens_where_the_folder_says_nothing(service, folder):
    assert_close(service.infer(TEXTS), embedded(folder, TEXTS))
    assert_close(service.infer(tuple(TEXTS[:1])), embedded(folder, TEXTS[:1]))


def test_every_form_of_the_protocol(listener, channel, folder):
    expected = embedded(folder, TEXTS)
    for texts in (TEXTS, [[text] for text in TEXTS]):
        shape = [len(TEXTS)] if texts is TEXTS else [len(TEXTS), 1]
        body = json.dumps({"inputs": [in_json(texts, shape=shape)]})
        (output,) = post(listener, body)[2]["outputs"]
        assert output["name"] == "embedding"
        assert_close(torch.tensor(output["data"]).view(output["shape"]), expected)
    typed = {"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)]}
    contents = {"bytes_contents": [text.encode() for text in TEXTS]}
    for request in (
        {"inputs": [{**typed, "contents": contents}]},
        {"inputs": [typed], "raw_input_contents": [packed(TEXTS)]},
    ):
        code, content, _ = infer(channel, {"model_name": "encoder", **request})
        assert code == Code.OK, content
        answer = message("ModelInferResponse").FromString(content)
        raw = answer.raw_output_contents
        numbers = np.frombuffer(raw[0], np.float32) if raw else np.array(answer.outputs[0].contents.fp32_contents)
        assert_close(torch.from_numpy(numbers.copy()).float().view(len(TEXTS), -1), expected)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_the_client_of_another_project(listener, folder, kind):
    triton = pytest.importorskip(f"tritonclient.{kind}", reason="needs tritonclient")
    address = listener.url.removeprefix("http://") if kind == "http" else listener.grpc_target
    client = triton.InferenceServerClient(address)
    try:
        given = triton.InferInput("text", [len(TEXTS)], "BYTES")
        given.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object))
        found = client.infer("encoder", [given]).as_numpy("embedding")
        assert_close(torch.from_numpy(found.copy()), embedded(folder, TEXTS))
        described = client.get_model_metadata("encoder")
        inputs = described["inputs"] if kind == "http" else described.inputs
        names = [tensor["name"] if kind == "http" else tensor.name for tensor in inputs]
        assert names == ["input_ids", "attention_mask", "token_type_ids", "text"]
    finally:
        client.close()


@pytest.mark.parametrize(
    ("tensors", "raw", "message"),
    [
        ([in_json([1, 2])], b"", "text: expected strings"),
        ([in_json(["w1"], shape=[2])], b"", "expected 2 strings for shape"),
        ([in_json([], shape=[0])], b"", "expected shape"),
        ([in_json(["w1"], datatype="FP32")], b"", "expected datatype BYTES"),
        ([in_json(["w1"], shape=[1, 2])], b"", "expected shape"),
        ([in_json("w1")], b"", "a list of strings"),
        ([in_json([""])], b"", "at least one token"),
        ([in_json(["\ud800"])], b"", "UTF-8"),
        ([in_json(["w1"]), {**in_json(["w1"]), "name": "input_ids"}], b"", "expected 'text' alone"),
        ([in_json(["w1"]), in_json(["w1"])], b"", "twice"),
        (None, b"\x02\0\0\0a", "announced, 1 came"),
        (None, b"\xff\xff\xff\xffab", "announced, 2 came"),
        (None, b"\x01\0\0", "a length of 4 bytes"),
        (None, packed(["w1", "w2"]), "expected 1 strings"),
        (None, b"\x01\0\0\0\xff", "UTF-8"),
        (None, b"", "expected 1 strings"),
    ],
)
def test_hostile_texts(listener, channel, tensors, raw, message):
    described = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    header = json.dumps({"inputs": [described] if tensors is None else tensors}).encode()
    headers = {} if tensors is not None else {"Inference-Header-Content-Length": str(len(header))}
    status, _, body = post(listener, header + raw, headers)
    assert status == 400
    assert message in body["error"]
    if tensors is None and raw:
        request = {"model_name": "encoder", "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}]}
        code, said, _ = infer(channel, {**request, "raw_input_contents": [raw]})
        assert (code, message in said) == (Code.INVALID_ARGUMENT, True)
    assert post(listener, json.dumps({"inputs": [in_json(["w1"])]}))[0] == 200


def test_bytes_that_are_no_message(channel):
    assert send(channel, b"\xff" * 30)[0] == Code.INVALID_ARGUMENT


def test_a_text_of_any_length_is_cut_where_the_model_ends(service, folder):
    long = " ".join(WORDS * 2000)
    assert len(long) > 2**14  # made tokens of beside the event loop
    assert_close(service.infer([long]), embedded(folder, [long]))


def test_outputs_of_texts_and_of_tokens(listener):
    wanted = [{"name": "last_hidden_state"}]
    status, _, body = post(listener, json.dumps({"inputs": [in_json(["w1"])], "outputs": wanted}))
    assert status == 400
    assert "expected 'embedding', got 'last_hidden_state'" in body["error"]


MODES = {
    "pooling_mode_mean_tokens": lambda h, m: (h * m).sum(1) / m.sum(1),
    "pooling_mode_cls_token": lambda h, m: h[:, 0],
    "pooling_mode_max_tokens": lambda h, m: (h - 1e9 * (1 - m)).amax(1),
    "pooling_mode_mean_sqrt_len_tokens": lambda h, m: (h * m).sum(1) / m.sum(1).sqrt(),
    "pooling_mode_lasttoken": lambda h, m: torch.stack(
        [row[int(n) - 1] for row, n in zip(h, m.sum((1, 2)), strict=True)]
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_pooling_as_the_folder_says(folder, tmp_path, mode):
    import shutil

    own = shutil.copytree(folder, tmp_path / "own")
    kinds = ["Transformer", "Pooling", *["Normalize"] * (mode != "pooling_mode_cls_token")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": "" if kind == "Transformer" else kind}
               for kind in kinds]  # fmt: skip
    (own / "modules.json").write_text(json.dumps(modules))
    (own / "Pooling").mkdir()
    (own / "Pooling" / "config.json").write_text(json.dumps({name: name == mode for name in MODES}))
    (own / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = word_tokenizer()(TEXTS, padding=True, truncation=True, max_length=5, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        expected = MODES[mode](model(**batch).last_hidden_state, batch["attention_mask"][:, :, None].float())
    with Service.load(own, unvalidated=True) as service:
        found = service.infer(TEXTS)
    assert_close(found, F.normalize(expected, dim=-1) if "Normalize" in kinds else expected)


def test_what_else_is_done_to_embeddings_is_not_guessed(folder, tmp_path):
    import shutil

    own = shutil.copytree(folder, tmp_path / "own")
    kinds = ["Transformer", "Dense"]
    (own / "modules.json").write_text(
        json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in kinds])
    )
    with Service.load(own, unvalidated=True) as service:
        assert service.models["own"].signature.text is None
        with pytest.raises(Refusal, match="takes tensors, no text"):
            service.infer(TEXTS)


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({"num_labels": 3}, lambda y: y.softmax(-1)),
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, lambda y: y),
    ],
)
def test_classes_become_probabilities(tmp_path, options, activation):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=43, initializer_range=0.5, **SIZES, **options)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "classes")
    word_tokenizer().save_pretrained(tmp_path / "classes")
    batch = word_tokenizer()(TEXTS[:2], padding=True, return_tensors="pt")
    with Service.load(tmp_path / "classes", unvalidated=True, limits=Limits(max_batch=2)) as service:
        found = service.infer(TEXTS[:2])
        assert service.models["classes"].signature.text_outputs[0].name == "probabilities"
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        assert_close(found, activation(model(**batch).logits))


CLASSES = ("calm", "storm: heavy", "fog")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A served classifier of texts whose config names its classes, and the model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("named") / "classes"
    names = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
    config = transformers.BertConfig(vocab_size=43, initializer_range=0.5, **SIZES, **names)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    with Service.load(folder, unvalidated=True) as service, Listener(service, port=0, grpc_port=0) as listener:
        yield service, listener, model


def likely(model):
    """(texts, classes) probabilities."""
    batch = word_tokenizer()(TEXTS, padding=True, truncation=True, max_length=32, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).logits.softmax(-1)


def test_classes_are_answered_by_name(classifier):
    service, listener, model = classifier
    expected = likely(model)
    names = [CLASSES[place] for place in expected.argmax(1)]
    assert len(set(names)) > 1
    found = service.infer(TEXTS)
    assert_close(found["probabilities"], expected)
    assert found["label"] == names
    status, _, answer = call(listener.url, "/v2/models/classes/infer", json.dumps({"inputs": [in_json(TEXTS)]}))
    assert status == 200
    assert [output["name"] for output in answer["outputs"]] == ["probabilities", "label"]
    assert answer["outputs"][1] == {"name": "label", "datatype": "BYTES", "shape": [len(TEXTS)], "data": names}


def test_metadata_name_the_classes(classifier):
    outputs = call(classifier[1].url, "/v2/models/classes")[2]["outputs"]
    assert {output["name"]: output.get("parameters", {}).get("labels") for output in outputs} == {
        "logits": list(CLASSES), "probabilities": list(CLASSES), "label": None,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_clients_of_another_project_read_classes(classifier, kind):
    triton = pytest.importorskip(f"tritonclient.{kind}", reason="needs tritonclient")
    _, listener, model = classifier
    expected = likely(model).topk(2)
    client = triton.InferenceServerClient(
        listener.url.removeprefix("http://") if kind == "http" else listener.grpc_target
    )
    try:
        given = triton.InferInput("text", [len(TEXTS)], "BYTES")
        given.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object))
        wanted = [triton.InferRequestedOutput("probabilities", class_count=2), triton.InferRequestedOutput("label")]
        answer = client.infer("classes", [given], outputs=wanted)
        found = [[text.decode().split(":", 2) for text in row] for row in answer.as_numpy("probabilities")]
        labels = [text.decode() for text in answer.as_numpy("label")]
        names = client.get_model_metadata("classes")["outputs"] if kind == "http" else None
    finally:
        client.close()
    assert_close(torch.tensor([[float(value) for value, _, _ in row] for row in found]), expected.values)
    assert [[int(place) for _, place, _ in row] for row in found] == expected.indices.tolist()
    assert [[name for _, _, name in row] for row in found] == [[CLASSES[i] for i in row] for row in expected.indices]
    assert labels == [row[0][2] for row in found]
    assert names is None or names[0]["parameters"]["labels"] == list(CLASSES)


def test_names_as_typed_contents(classifier):
    import grpc

    _, listener, model = classifier
    typed = {"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [TEXTS[0].encode()]}}
    with grpc.insecure_channel(listener.grpc_target) as channel:
        _, content, _ = infer(channel, {"model_name": "classes", "inputs": [typed]})
    label = message("ModelInferResponse").FromString(content).outputs[1]
    assert list(label.contents.bytes_contents) == [CLASSES[likely(model)[0].argmax()].encode()]


def test_classes_that_are_only_counted_have_no_names(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=43, num_labels=3, **SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "counted")
    word_tokenizer().save_pretrained(tmp_path / "counted")
    with Service.load(tmp_path / "counted", unvalidated=True) as service:
        assert [spec.labels for spec in service.models["counted"].signature.outputs] == [()]
        assert service.infer(TEXTS[:1]).shape == (1, 3)


def test_a_dense_folder_has_no_verdict(folder):
    with pytest.raises(cx.InvalidOption, match="never validated"):
        Service.load(folder)


def test_language_models_take_tokens_only(tmp_path):
    language_model(tmp_path / "decoder")
    with Service.load(tmp_path / "decoder", unvalidated=True) as service:
        assert service.models["decoder"].signature.text is None
