"""Measured against predicted time of the recorder's operations."""

from __future__ import annotations

from typing import Any

import pytest
from cli.test_dumps import dump, operation
from smddp.observability import predictions
from smddp.observability.predictions import Predictions


class Model:
    """Stands in for a communicator: records the arguments of its estimates."""

    size = 2

    def __init__(self, seconds: float = 2e-6) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.seconds = seconds

    def estimate(self, *arguments: int) -> float:
        self.asked.append(arguments)
        return self.seconds


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    found = Model()
    monkeypatch.setattr(predictions, "communicators", lambda: {"0": found})
    return found


GROUP = dump()["groups"][0]


def call(text: str, seq: int = 1, nanoseconds: int = 4000, nbytes: int = 28) -> dict[str, Any]:
    what = text.partition("(")[0]
    times = {"submitted_ns": 1000, "started_ns": 2000, "ended_ns": 2000 + nanoseconds}
    return {**operation(seq), **times, "what": f"{what} #{seq}", "call": text, "bytes": nbytes}


def test_calls_are_predicted_with_their_type_size_and_root(model: Model):
    predict = Predictions(1.0)
    predict.begin()
    for text in (
        "all_reduce(7 elements of float32, sum)",
        "broadcast(14 elements of bfloat16, root 3)",
        "reduce(7 elements of int32, sum, root 1, as SMDDP_WIRE_FORMAT says)",
        "barrier(0 elements of float32)",
    ):
        assert predict(GROUP, call(text)) == 2e-6
    assert model.asked == [(2, 0, 28, 0), (3, 3, 28, 3), (4, 6, 28, 1), (8, 0, 28, 0)]


@pytest.mark.parametrize(
    "text",
    [
        "all_reduce(7 elements of float32, sum) on CUDA",
        "all_reduce(7 elements of ?, sum)",
        "destroy_process_group",
        "an unknown call (0x7)",
    ],
)
def test_calls_that_the_model_does_not_have_are_not_predicted(text: str, model: Model):
    predict = Predictions(1.0)
    predict.begin()
    assert predict(GROUP, call(text)) is None and model.asked == []


def test_a_kind_of_call_is_simulated_once_within_the_time_of_an_update(model: Model):
    predict = Predictions(0.0)
    predict.begin()
    assert predict(GROUP, call("all_reduce(7 elements of float32, sum)")) is None and model.asked == []
    predict = Predictions(1.0)
    for _ in range(3):
        predict.begin()
        assert predict(GROUP, call("all_reduce(7 elements of float32, sum)")) == 2e-6
    assert len(model.asked) == 1
    # Another group of that name has its own nodes.
    predict({**GROUP, "id": "44"}, call("all_reduce(7 elements of float32, sum)"))
    assert len(model.asked) == 2


def test_ratio_has_the_shortest_time_of_each_kind_of_call():
    """One kind takes 4 us and 9 us, the other 30 us; the model says 2 us for both: (2 * 4 + 30) / (3 * 2)."""
    texts = ["all_reduce(7 elements of float32, sum)", "all_reduce(9 elements of float32, sum)"]
    ops = [call(texts[0]), call(texts[0], 2, 9000), call(texts[1], 3, 30_000), call("barrier()", 4)]
    predict = lambda _group, op: None if op["call"] == "barrier()" else 2e-6  # noqa: E731 (a predictor)
    assert predictions.ratios(GROUP, ops, predict) == {"all_reduce": pytest.approx(38 / 6)}
    # The last rank called 3 us after the start of call 1.
    assert predictions.ratios(GROUP, ops[:1], predict, {1: 5000}) == {"all_reduce": pytest.approx(0.5)}
    assert predictions.ratios(GROUP, [], predict) == {}


def test_metrics_average_the_ratios_of_updates():
    pytest.importorskip("prometheus_client")
    from smddp.observability.metrics import Metrics

    text = "all_reduce(7 elements of float32, sum)"
    link = {"peer": 1, "min_rtt_us": 300, "delivery_bytes_per_s": None, "mean_bytes_per_s": None, "sent_bytes": 9}
    network = {"latency_us": 50.0, "bytes_per_s": 1e9, "basis": "measured"}
    metrics, one = Metrics(0, lambda _group, _op: 2e-6), dump()
    del one["groups"][0]["present"]
    group = {**GROUP, "network": network, "links": [{**link, "receiver_limited": 0.0}]}

    def sampled(*ops: dict[str, Any]) -> dict[str, float]:
        metrics.update({**one, "groups": [{**group, "operations": list(ops)}]}, [])
        return {sample.name: sample.value for family in metrics.collect() for sample in family.samples}

    first = call(text, 1, 4000)
    found = sampled(first)
    assert found["smddp_measured_to_predicted_ratio"] == pytest.approx(2)
    assert found["smddp_link_measured_to_predicted_ratio"] == pytest.approx(3)
    # An update without a new call changes nothing.
    assert sampled(first)["smddp_measured_to_predicted_ratio"] == pytest.approx(2)
    found = sampled(first, call(text, 2, 8000))
    assert found["smddp_measured_to_predicted_ratio"] == pytest.approx(2 + 0.3 * 2)
