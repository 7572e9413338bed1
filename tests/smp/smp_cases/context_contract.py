"""Context parallelism: positions, traffic between ranks, and rejected input."""

import contextlib
import functools
import itertools
import threading

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smddp.sagemaker.context_parallel import chunks, ring
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank, setup_transformer_engine_cp_groups
from smp_cases.context_parallel import TOKENS, batch, part_of_batch
from smp_cases.models import VOCABULARY, tiny

LAYERS, HEADS, HEAD = 2, 2, 8  # of the tiny Llama: layers, key and value heads, elements of each


@contextlib.contextmanager
def initialized(**degrees):
    tsm.init({f"{key}_parallel_degree": degree for key, degree in degrees.items()})
    try:
        yield
    finally:
        tsm.state.reset()


@contextlib.contextmanager
def replaced(owner, name: str, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def fails(error: type, words: str, body) -> None:
    """Asserts that ``body`` raises ``error`` with ``words`` on this rank."""
    with refused(words, kind=error):
        body()


def case_context_groups_are_neighbours_in_the_sharding_group():
    rank, ranks_of = dist.get_rank(), dist.get_process_group_ranks
    assert (tsm.state.cp_rank, tsm.state.cp_size, tsm.state.cp_process_group) == (0, 1, None)
    for config, group, place in (
        ({"tensor_parallel_degree": 2}, [rank % 2, rank % 2 + 2], (rank // 2, 0, 1)),
        ({"hybrid_shard_degree": 2}, [rank // 2 * 2, rank // 2 * 2 + 1], (rank % 2, rank // 2, 2)),
        ({"hybrid_shard_degree": 4}, [rank // 2 * 2, rank // 2 * 2 + 1], (rank % 2, rank // 2, 2)),
    ):
        tsm.init({"context_parallel_degree": 2, **config})
        try:
            state = tsm.state
            assert ranks_of(state.cp_process_group) == group and state.cp_size == 2
            assert (state.cp_rank, state.dp_rank, state.dp_size) == place
            assert state.cp_process_group.rank() == state.cp_rank
        finally:
            tsm.state.reset()


def case_every_container_of_a_batch_is_split():
    ids = torch.arange(2 * TOKENS).view(2, TOKENS)
    assert get_batch_for_cp_rank(ids) is ids
    with initialized(context=4):
        rank = dist.get_rank()
        mine = torch.cat([ids[:, 2 * rank : 2 * rank + 2], ids[:, 14 - 2 * rank : 16 - 2 * rank]], 1)
        assert torch.equal(get_batch_for_cp_rank(ids), mine)
        first, none = get_batch_for_cp_rank((ids, None))
        assert torch.equal(first, mine) and none is None
        assert torch.equal(get_batch_for_cp_rank({"labels": ids})["labels"], mine)
        fails(ValueError, "do not divide into the 2 x 4 chunks", lambda: get_batch_for_cp_rank(ids[:, :12]))
        fails(ValueError, "no dimension 1", lambda: get_batch_for_cp_rank([ids[0]]))
        fails(TypeError, "item 1 must be a tensor", lambda: get_batch_for_cp_rank((ids, 3)))


def case_ring_transfers_overlap_with_attention():
    """An event log of one layer, forward and backward, round a ring of four."""
    events = []

    def logged(name, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as stack, initialized(context=4):
        model = tsm.transform(tiny(num_hidden_layers=1))
        for owner, attribute, name in (
            (dist, "batch_isend_irecv", "start"),
            (ring.Passing, "wait", "wait"),
            (ring, "attend", "attend"),
            (ring, "attend_backward", "backward"),
        ):
            stack.enter_context(replaced(owner, attribute, logged(name, getattr(owner, attribute))))
        loss = model(**part_of_batch(batch("causal", 0))).loss
        forward = [name for name, _ in itertools.groupby(events)]
        events.clear()
        loss.backward()
        backward = [name for name, _ in itertools.groupby(events)]
    assert forward == ["start", "attend", "wait"] * 3 + ["attend"], forward
    # Gradients go round behind the keys, and once more to get home.
    assert backward == ["start", "backward", "wait"] * 4 + ["start", "wait"], backward


def case_a_ring_sends_the_bytes_of_the_formula():
    """Per rank and layer: (cp - 1) K forward and 2 (cp - 1) K backward, K the bytes of a rank's keys and values."""
    sent = []
    start = dist.batch_isend_irecv

    def counting(operations):
        sent.extend(p.tensor.numel() * p.tensor.element_size() for p in operations if p.op is dist.isend)
        return start(operations)

    for context, tensor in ((2, 1), (4, 1), (2, 2)):
        with initialized(context=context, tensor=tensor), replaced(dist, "batch_isend_irecv", counting):
            model = tsm.transform(tiny())
            given = part_of_batch(batch("causal", 0))
            keys = 2 * given["input_ids"].numel() * HEADS // tensor * HEAD * 4
            sent.clear()
            loss = model(**given).loss
            assert sum(sent) == LAYERS * (context - 1) * keys, (context, tensor, sum(sent), keys)
            sent.clear()
            loss.backward()
            assert sum(sent) == LAYERS * 2 * (context - 1) * keys, (context, tensor, sum(sent), keys)


def case_gathers_send_the_bytes_of_the_formula():
    """A rank sends (cp - 1)/cp of cp K in each direction; what masks and labels need comes once a pass, not per layer.

    By smddp's own counters, so on it alone.
    """
    if dist.get_backend() != "smddp":
        return
    with initialized(context=2):
        model = tsm.transform(tiny(), cp_comm_type="all_gather")
        given = part_of_batch(batch("causal", 0))
        samples, tokens = given["input_ids"].shape
        keys = 2 * samples * tokens * HEADS * HEAD * 4
        before = _counted()
        loss = model(**given).loss
        middle = _counted()
        loss.backward()
        after = _counted()
        header = 8 * 8 + 8 * 2 * samples  # eight sizes, and two labels a sample
        assert middle["all_gather"] - before["all_gather"] == 2 * (LAYERS * keys + header), (before, middle, keys)
        assert after["reduce_scatter"] - middle["reduce_scatter"] == 2 * LAYERS * keys, (middle, after, keys)
        assert after["all_gather"] == middle["all_gather"]


def _counted() -> dict:
    """Returns the total bytes by collective, over groups of two."""
    import smddp

    total = {"all_gather": 0, "reduce_scatter": 0}
    for entry in smddp.traffic():
        if entry["size"] == 2 and entry["collective"] in total:
            total[entry["collective"]] += entry["bytes"]
    return total


def case_unsupported_models_are_rejected_before_any_change():
    with initialized(context=2):
        fails(ValueError, "of transformers models only", lambda: tsm.transform(torch.nn.Linear(2, 2)))
        fails(ValueError, "transformers' registry", lambda: tsm.transform(tiny("falcon")))
        model = tiny()
        fails(ValueError, "must be one of 'p2p', 'all_gather'", lambda: tsm.transform(model, cp_comm_type="ring"))
        assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks


def case_invalid_input_raises_on_every_rank():
    """Covers invalid input on a single rank, too."""
    with initialized(context=4):
        model = tsm.transform(tiny())
        whole = batch("causal", 0)
        part = part_of_batch(whole)
        ids, rank = part["input_ids"], dist.get_rank()
        mask = torch.ones_like(ids)
        fails(ValueError, "were given the same 16 tokens", lambda: model(**whole))
        fails(ValueError, "do not split into two chunks", lambda: model(input_ids=ids[:, :3]))
        fails(ValueError, "tokens differs", lambda: model(input_ids=ids[:, : 2 if rank == 2 else 4]))
        fails(ValueError, "with labels differs", lambda: model(input_ids=ids, labels=ids if rank else None))
        fails(ValueError, "cut it with", lambda: model(input_ids=ids, attention_mask=torch.ones(4, TOKENS)))
        fails(ValueError, "use_cache must be False", lambda: model(input_ids=ids, use_cache=True))
        fails(ValueError, "neither input_ids nor", lambda: model(attention_mask=mask))
        if rank == 1:
            words = "must be this rank's part of a tensor (batch, sequence)"
            fails(NotImplementedError, words, lambda: model(input_ids=ids, attention_mask=mask[:, None, None]))
        else:
            fails(ValueError, "rank 1 of this context group", lambda: model(input_ids=ids, attention_mask=mask))
        assert torch.isfinite(model(**part).loss)  # and none of that has left anything behind


def case_repeated_text_is_accepted_only_if_it_was_split():
    """Distinguishes by positions: the tokens of all ranks are equal in both cases."""
    for period in (1, 2, 4, 8):
        whole = torch.arange(period).repeat(2, 2 * TOKENS // period) + 5
        inputs = {"input_ids": whole, "labels": whole}
        plain = tiny()(**inputs, use_cache=False).loss.detach()
        for context in (2, 4):
            with initialized(context=context):
                model = tsm.transform(tiny())
                assert abs(model(**get_batch_for_cp_rank(inputs)).loss.detach() - plain) < 1e-5, (period, context)
                # A script that cuts its batches gives the places.
                part = {name: chunks.cut(rows, tsm.state.cp_rank, context) for name, rows in inputs.items()}
                places = chunks.indices(tsm.state.cp_rank, context, 2 * TOKENS).expand(2, -1)
                assert abs(model(**part, position_ids=places).loss.detach() - plain) < 1e-5, (period, context)
                fails(ValueError, f"the same {2 * TOKENS} tokens", lambda: model(**inputs))  # noqa: B023
                same = torch.arange(2 * TOKENS).expand(2, -1)
                fails(ValueError, "tokens and position_ids", lambda: model(**inputs, position_ids=same))  # noqa: B023


def case_forward_passes_of_two_models_do_not_share_tokens():
    """Nested passes, and passes in two threads."""
    whole = batch("padded", 0), batch("causal", 1)
    plain = [float(tiny()(**each, use_cache=False).loss.detach()) for each in whole]
    with initialized(context=4):
        outer, inner = tsm.transform(tiny()), tsm.transform(tiny())
        parts, found = [part_of_batch(each) for each in whole], []

        def teach(*_):
            found.append(float(inner(**parts[1]).loss.detach()))

        handle = outer.model.layers[0].register_forward_hook(teach)
        found.append(float(outer(**parts[0]).loss.detach()))
        handle.remove()
        assert abs(found[0] - plain[1]) < 1e-5 and abs(found[1] - plain[0]) < 1e-5, (found, plain)
        thread = threading.Thread(target=teach)

        def beside(*_):
            thread.start()
            thread.join()

        outer.model.layers[0].register_forward_hook(beside)
        assert abs(float(outer(**parts[0]).loss.detach()) - plain[0]) < 1e-5
        assert abs(found[2] - plain[1]) < 1e-5


def case_attention_dropout_needs_all_gather():
    with initialized(context=2):
        part = part_of_batch(batch("causal", 0))
        model = tsm.transform(tiny(attention_dropout=0.5).train())
        fails(ValueError, 'use cp_comm_type="all_gather"', lambda: model(**part))
        gathered = tsm.transform(tiny(attention_dropout=0.5).train(), cp_comm_type="all_gather")
        assert float(gathered(**part).loss.detach()) != float(model.eval()(**part).loss.detach())


def case_a_layer_that_attends_to_its_local_part_only_is_reported():
    class Alone(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    with initialized(context=2):
        model = tiny()
        model.model.layers[1].self_attn = Alone()
        model = tsm.transform(model)
        words = "1 of 2 layers attended to the whole sequence"
        fails(NotImplementedError, words, lambda: model(**part_of_batch(batch("causal", 0))))


def case_losses_use_the_callers_label_count():
    """`num_items_in_batch` counts those of whole sequences, and `shift_labels` are taken as they are."""
    whole = batch("causal", 0)
    plain = tiny()(**whole).loss.detach()
    with initialized(context=4):
        model = tsm.transform(tiny())
        part = part_of_batch(whole)
        labels = whole["labels"].numel() - len(whole["labels"])
        found = model(**part, num_items_in_batch=2 * labels).loss.detach()
        assert abs(2 * found - plain) < 1e-5, (found, plain)
        shifted = torch.nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=-100)
        part["labels"] = part["shift_labels"] = get_batch_for_cp_rank(shifted)
        found = model(**part).loss.detach()
        assert abs(found - plain) < 1e-5, (found, plain)
        as_tuple = model(**part, return_dict=False)
        assert abs(as_tuple[0].detach() - plain) < 1e-5
        assert as_tuple[1].shape == (*part["input_ids"].shape, VOCABULARY)


def case_sequence_parallelism_splits_context_parallel_parts():
    """Sequence parallelism splits the parts of context parallelism."""
    whole = batch("padded", 0)
    plain = tiny()(**whole, use_cache=False).loss.detach()
    with initialized(context=2, tensor=2):
        model = tsm.transform(tiny(), config={"sequence_parallel": True})
        assert abs(model(**part_of_batch(whole)).loss.detach() - plain) < 1e-5


def case_transformer_engines_layers_get_their_group():
    class Engine(torch.nn.Module):
        def set_context_parallel_group(self, *arguments):
            self.context = arguments[:2]

    with initialized(context=2):
        group = tsm.state.cp_process_group
        ranks = dist.get_process_group_ranks(group)
        model = torch.nn.Sequential(Engine())
        setup_transformer_engine_cp_groups(model, ranks, group)
        assert model[0].context == (group, ranks)
        setup_transformer_engine_cp_groups(tsm.transform(tiny()), ranks, group)
        fails(
            ValueError, "call tsm.transform() first", lambda: setup_transformer_engine_cp_groups(tiny(), ranks, group)
        )
        fails(ValueError, "not those of the group", lambda: setup_transformer_engine_cp_groups(model, [0, 3], group))
