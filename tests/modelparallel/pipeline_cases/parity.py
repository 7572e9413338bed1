"""Every kind of model against one process: losses to the bit, gradients to the bit where no parameter is used twice."""

import time

import torch
import torch.distributed as dist
from pipeline_cases.against import Pipeline, check, gradients, leaves, one_process
from pipeline_cases.networks import NETWORKS, SHARED, PingPong, Skips, classes, gpt2, ids, language, rows
from smddp.modelparallel.activation import set_activation_checkpointing
from smddp.modelparallel.state import state


def alternate(net, stages):
    return [(layer, index % stages) for index, layer in enumerate(net.layers)]


def one(name, stages, microbatches, pipeline, rows=1, **config):
    """rows: times as many as the model's data has."""
    make, function, data = NETWORKS[name]
    place = alternate if make is PingPong else None
    data = tuple(torch.cat([x] * rows) for x in data())
    check(
        make, function, data, stages, microbatches, pipeline=pipeline, exact=name not in SHARED, place=place, **config
    )


def case_four_stages_are_as_one_process():
    for name in ("gpt2", "t5", "llama", "skips", "branches", "pingpong"):
        one(name, 4, 4, "interleaved")


def case_two_stages_with_two_replicas_are_as_one_process():
    for name in ("bert", "bart", "neox", "vit", "skips", "pingpong"):
        one(name, 2, 4, "simple")
    one("skips", 2, 2, "interleaved")


def case_one_stage_with_four_replicas_is_as_one_process():
    one("skips", 1, 4, "interleaved")
    one("llama", 1, 2, "simple")


def case_checkpointed_layers_are_as_one_process():
    with Pipeline(gpt2, language, ids(), 4, 4) as both:
        for block in both.module.transformer.h:
            set_activation_checkpointing(block)
        wanted, wanted_gradients = one_process(both.alone, language, both.data, 4)
        (found,) = leaves(both.run())
        assert [float(x) for x in found.outputs] == [float(x[0]) for x in wanted]
        for name, gradient in gradients(both.model).items():
            assert torch.allclose(gradient, wanted_gradients[name], rtol=1e-5, atol=1e-7), name


def case_between_neighbours_one_tensor_passes_forward_and_one_back():
    class Straight(torch.nn.Sequential):
        def __init__(self):
            super().__init__(*(torch.nn.Linear(32, 32) for _ in range(8)))

    def square(model, x, labels):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    def spread(net, stages):
        return [(layer, index * stages // len(net)) for index, layer in enumerate(net)]

    with Pipeline(Straight, square, rows(), 4, 4, place=spread) as both:
        both.run()
        mail, stage = both.model.mail, state.ranks.pp_rank
        mail.tensors.clear()
        both.run()
        # The last stage also sends the loss to each other stage.
        wanted = {}
        if stage < 3:
            wanted[stage + 1] = 4
        if stage > 0:
            wanted[stage - 1] = 4
        if stage == 3:
            wanted = {0: 4, 1: 4, 2: 8}
        assert dict(mail.tensors) == wanted, (stage, mail.tensors)


def case_each_stage_keeps_at_most_its_limit_of_microbatches():
    for active in (4, 6):
        with Pipeline(Skips, classes, rows(), 4, 16, active_microbatches=active) as both:
            both.run()
            both.run()
            peak, stage = both.model.measured.peak, state.ranks.pp_rank
            assert peak <= max(1, active - stage), (stage, peak)


def case_an_operation_between_parts_costs_little_once_seen():
    """0.15 ms of this thread, in the fastest of several steps, as other processes share the machine."""

    def many(model, x, labels):
        h = model(x)
        begun = time.thread_time()
        for _ in range(200):
            h = h * 1.001
        took.append((time.thread_time() - begun) / 200)
        loss = h.pow(2).mean()
        model.backward(loss)
        return loss

    took = []
    with Pipeline(Skips, many, rows(), 4, 1) as both:
        for _ in range(5):
            both.run()
        every = [None] * 4
        dist.all_gather_object(every, min(took[2:]))
        assert max(every) < 0.15e-3, every
