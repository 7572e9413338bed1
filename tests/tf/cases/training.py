"""Ranks on shards against one process on the whole batch: tape, optimizer, embeddings, loops and branches."""

import itertools

import numpy as np
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf

STEPS, BATCH = 20, 24


def model(seed=7):
    tf.keras.utils.set_random_seed(seed)
    made = tf.keras.Sequential(
        [tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(8), tf.keras.layers.Dense(1)]
    )
    made.build((None, 5))
    return made


def data():
    generator = np.random.default_rng(3)
    inputs = generator.standard_normal((STEPS, BATCH, 5)).astype("float32")
    return inputs, (inputs.sum(-1, keepdims=True) ** 2).astype("float32")


def shard(array):
    each = BATCH // sdp.size()
    return array[sdp.rank() * each : (sdp.rank() + 1) * each]


def loss_of(made, inputs, targets):
    return tf.reduce_mean((made(inputs, training=True) - targets) ** 2)


def optimizers():
    yield "SGD", lambda: tf.keras.optimizers.SGD(0.01, momentum=0.9)
    yield "Adam", lambda: tf.keras.optimizers.Adam(0.01)
    if hasattr(tf.keras.optimizers, "legacy") and not hasattr(tf.keras.optimizers.Optimizer, "apply"):
        yield "legacy Adam", lambda: tf.keras.optimizers.legacy.Adam(0.01)


def stepping(made, optimizer, taped=lambda tape: tape):
    """A step that returns its loss. taped: what is done with the tape after it has recorded."""

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = loss_of(made, inputs, targets)
        gradients = taped(tape).gradient(loss, made.trainable_variables)
        optimizer.apply_gradients(zip(gradients, made.trainable_variables))
        return loss

    return step


def whole(make):
    """One process's losses and weights after all steps on the whole batch."""
    made = model()
    step = tf.function(stepping(made, make()))
    return [float(step(*pair)) for pair in zip(*data())], weights(made)


def sharded(step):
    """The ranks' losses, averaged, after all steps on this rank's part of each batch."""
    return [float(sdp.oob_allreduce(step(shard(inputs), shard(targets)))) for inputs, targets in zip(*data())]


def weights(made):
    return np.concatenate([variable.numpy().ravel() for variable in made.trainable_variables])


def alike(made, losses, want):
    wanted_losses, wanted_weights = want
    np.testing.assert_allclose(losses, wanted_losses, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(weights(made), wanted_weights, atol=2e-6, rtol=1e-5)
    everyones = sdp.get_worker_comm().allgather(weights(made).tobytes())
    assert len(set(everyones)) == 1, "ranks differ"


def case_a_distributed_tape_has_one_processs_losses():
    for name, make in optimizers():
        for traced in (True, False) if name == "SGD" else (True,):
            made, optimizer = model(seed=7 + sdp.rank()), make()
            sdp.broadcast_variables(model().variables, 0)
            sdp.broadcast_variables(made.variables, 0)

            step = stepping(made, optimizer, sdp.DistributedGradientTape)
            losses = sharded(tf.function(step) if traced else step)
            alike(made, losses, whole(make))


def case_a_distributed_optimizer_has_one_processs_losses():
    for _, make in optimizers():
        made, optimizer = model(), sdp.DistributedOptimizer(make(), bucket_cap_mb=0.0005)

        losses = sharded(tf.function(stepping(made, optimizer)))
        alike(made, losses, whole(make))


def case_a_wrapped_optimizer_keeps_its_state_and_saves_as_a_plain_one():
    made, optimizer = model(), tf.keras.optimizers.Adam(0.01)
    inputs, targets = data()
    for at in range(2):
        if at == 1:
            optimizer = sdp.DistributedOptimizer(optimizer)
        with tf.GradientTape() as tape:
            loss = loss_of(made, inputs[at], targets[at])
        optimizer.apply_gradients(zip(tape.gradient(loss, made.trainable_variables), made.trainable_variables))
        assert int(optimizer.iterations) == at + 1
    saved = tf.keras.optimizers.serialize(optimizer)
    assert "smddp" not in str(saved).lower()
    assert type(tf.keras.optimizers.deserialize(saved)) is tf.keras.optimizers.Adam
    try:
        sdp.DistributedOptimizer(optimizer)
    except ValueError as error:
        assert "wrapped already" in str(error)
    else:
        raise AssertionError("wrapped twice")


def case_backward_passes_are_accumulated_before_the_reduction():
    for average in (False, True):
        made, optimizer = model(), tf.keras.optimizers.SGD(0.01)
        optimizer = sdp.DistributedOptimizer(
            optimizer, backward_passes_per_step=2, average_aggregated_gradients=average
        )
        plain, plain_optimizer = model(), tf.keras.optimizers.SGD(0.01)

        step = tf.function(stepping(made, optimizer))
        inputs, targets = data()
        for at in range(0, 6, 2):
            for each in (at, at + 1):
                step(shard(inputs[each]), shard(targets[each]))
            with tf.GradientTape() as tape:
                loss = sum(loss_of(plain, inputs[each], targets[each]) for each in (at, at + 1))
                loss = loss / 2 if average else loss
            gradients = tape.gradient(loss, plain.trainable_variables)
            plain_optimizer.apply_gradients(zip(gradients, plain.trainable_variables))
        np.testing.assert_allclose(weights(made), weights(plain), atol=2e-6, rtol=1e-5)


def case_a_gradient_absent_from_the_first_pass_is_summed_or_refused():
    def made():
        optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2)
        return optimizer, [tf.Variable([1.0]), tf.Variable([1.0])]

    def step(optimizer, both, use_second):
        with tf.GradientTape() as tape:
            loss = both[0] * 2 + (both[1] if use_second else 0.0)
        optimizer.apply_gradients(zip(tape.gradient(loss, both), both))

    optimizer, both = made()
    for use_second in (False, True, False, True):
        step(optimizer, both, use_second)
    np.testing.assert_allclose([float(variable[0]) for variable in both], [0.2, 0.8], rtol=1e-6)

    optimizer, both = made()
    optimizer.build(both)
    traced = tf.function(lambda use_second: step(optimizer, both, use_second))
    traced(False)
    try:
        traced(True)
    except ValueError as error:
        assert "variable 1 has a gradient in this pass" in str(error), error
    else:
        raise AssertionError("the second variable's gradient was dropped")


def case_a_variable_without_a_gradient_in_a_step_keeps_its_value():
    """By pass of two steps of two passes: the second variable's use, on every rank or on one pass per rank."""
    schedules = {
        "absent in the second step": ("sparse", "sparse", None, None),
        "in one pass": ("dense", None, None, "dense"),
        "in another pass on each rank": ("sparse", "sparse", "by rank", "by other rank"),
        "sparse and dense": ("dense", "dense", "kind by rank", "kind by other rank"),
        "none at first": (None, None, "dense", None),
    }
    makers = {
        "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
        "decay": lambda: tf.keras.optimizers.AdamW(0.1, weight_decay=0.1),
    }
    for (schedule, uses), (maker, make), traced in itertools.product(schedules.items(), makers.items(), (False, True)):
        if traced and schedule != "absent in the second step" and schedule != "in one pass":
            continue
        label = f"{schedule}, {maker}, traced={traced}"
        check_absent_gradients(uses, make, traced, label)


def use_at(use, rank):
    """This rank's use of the second variable in a pass."""
    if use in ("by rank", "by other rank"):
        return "dense" if (rank % 2 == 0) == (use == "by rank") else None
    if use in ("kind by rank", "kind by other rank"):
        return "dense" if (rank % 2 == 0) == (use == "kind by rank") else "sparse"
    return use


def check_absent_gradients(uses, make, traced, label):
    def variables():
        return [tf.Variable([1.0]), tf.Variable([[1.0], [2.0], [3.0]])]

    def loss(both, use, factor):
        value = tf.reduce_sum(both[0]) * factor
        if use == "dense":
            return value + tf.reduce_sum(both[1] ** 2)
        return value if use is None else value + tf.reduce_sum(tf.gather(both[1], [0, 2]) ** 2)

    def step(optimizer, both, use, factor):
        with tf.GradientTape() as tape:
            total = loss(both, use, factor)
        optimizer.apply_gradients(zip(tape.gradient(total, both), both))

    distributed, both = make(), variables()
    distributed = sdp.DistributedOptimizer(distributed, backward_passes_per_step=2, average_aggregated_gradients=True)
    plain, wanted = make(), variables()
    for optimizer, own in ((distributed, both), (plain, wanted)):
        if hasattr(optimizer, "build"):
            optimizer.build(own)
    run = tf.function(step) if traced else step
    for at in range(0, len(uses), 2):
        for use in uses[at : at + 2]:
            run(distributed, both, use_at(use, sdp.rank()), 1.0 + sdp.rank())
        with tf.GradientTape() as tape:
            parts = [
                loss(wanted, use_at(use, rank), 1.0 + rank) for use in uses[at : at + 2] for rank in range(sdp.size())
            ]
            total = tf.add_n(parts) / len(parts)
        gradients = tape.gradient(total, wanted)
        plain.apply_gradients(zip(gradients, wanted))
    for found, want in zip(both, wanted):
        np.testing.assert_allclose(found.numpy(), want.numpy(), rtol=1e-5, atol=1e-6, err_msg=label)


def case_functions_that_use_a_part_of_the_absent_variables_are_refused():
    optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=2)
    three = [tf.Variable([1.0]) for _ in range(3)]
    optimizer.build(three)

    def step(*used):
        with tf.GradientTape() as tape:
            loss = tf.add_n([three[at] for at in used])
        optimizer.apply_gradients(zip(tape.gradient(loss, three), three))

    every, second, first = (tf.function(lambda used=used: step(*used)) for used in ((0, 1, 2), (0, 1), (0,)))
    every(), first()
    try:
        second(), first()
    except tf.errors.InvalidArgumentError as error:
        assert "use them together" in str(error), error
    else:
        raise AssertionError("not refused")


def case_an_optimizer_inside_a_loss_scale_optimizer_is_wrapped_once():
    inner = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
    try:
        sdp.DistributedOptimizer(tf.keras.mixed_precision.LossScaleOptimizer(inner))
    except ValueError as error:
        assert "wrapped already" in str(error)
    else:
        raise AssertionError("wrapped twice")


def case_gradients_of_an_embedding_are_one_processs_both_ways():
    inputs = np.random.default_rng(5).integers(0, 11, (BATCH, 3))

    def table():
        return tf.Variable(tf.reshape(tf.range(22.0), (11, 2)) / 10)

    def loss(table, ids):
        return tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids) ** 2, axis=[1, 2]))

    def gradient_of(own, dense):
        def gradient(ids):
            with sdp.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=dense) as tape:
                value = loss(own, ids)
            return tape.gradient(value, own)

        return gradient

    plain = table()
    with tf.GradientTape() as tape:
        value = loss(plain, inputs)
    want = tf.convert_to_tensor(tape.gradient(value, plain)).numpy()
    for dense in (True, False):
        for traced in (True, False):
            own = table()

            gradient = gradient_of(own, dense)
            found = (tf.function(gradient) if traced else gradient)(shard(inputs))
            assert isinstance(found, tf.IndexedSlices) is not dense
            np.testing.assert_allclose(tf.convert_to_tensor(found).numpy(), want, rtol=1e-5)


def case_missing_gradients_are_none_and_structures_are_kept():
    used, unused = tf.Variable(2.0), tf.Variable(3.0)
    with sdp.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = used * used * (sdp.rank() + 1)
    found = tape.gradient(loss, {"used": used, "unused": unused})
    assert found["unused"] is None
    assert np.isclose(found["used"].numpy(), 4 * (sdp.size() + 1) / 2)
    assert isinstance(tape, tf.GradientTape) and tape.watched_variables() == (used,)
    zero = tape.gradient(loss, unused, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert zero.numpy() == 0


def case_two_hundred_independent_calls_in_loops_and_branches_keep_their_order():
    @tf.function
    def step(values, times):
        for _ in tf.range(times):
            values = [sdp.oob_allreduce(value, op=sdp.ReduceOp.SUM) / sdp.size() for value in values]
        if values[0][0] > 0:
            more = [sdp.oob_allreduce(value * 2, op=sdp.ReduceOp.MAX) for value in values]
        else:
            more = [value * 0 for value in values]
        first = sdp.broadcast(values[0], 0)
        return [first, *more]

    # Different sizes, so that mismatched calls raise.
    values = [tf.fill([at + 1], tf.cast(at + 1, tf.float32)) for at in range(60)]
    for _ in range(15):
        found = step(values, tf.constant(2))
        for at, result in enumerate(found[1:]):
            assert result.shape == (at + 1,) and np.all(result.numpy() == 2 * (at + 1))

    # Functions and branches that know nothing of each other.
    functions = [
        tf.function(lambda value: sdp.oob_allreduce(tf.sin(value) * 0 + 1, op=sdp.ReduceOp.SUM)) for _ in values
    ]

    @tf.function
    def nested(values, which):
        apart = [tf.reduce_sum(function(value)) for function, value in zip(functions, values)]
        for value in values[:20]:
            apart.append(tf.cond(which > 0, lambda: tf.reduce_sum(functions[0](value)), lambda: 0.0))  # noqa: B023
            apart.append(tf.reduce_sum(sdp.oob_allreduce(tf.cos(value), op=sdp.ReduceOp.SUM) * 0))
        return apart

    for _ in range(15):
        found = [float(total) for total in nested(values, tf.constant(1))]
        assert found[:60] == [(at + 1) * sdp.size() for at in range(60)]

    @tf.function
    def many(values):
        return [sdp.oob_allreduce(value, op=sdp.ReduceOp.SUM) for value in values]

    values = [tf.ones([at % 7 + 1]) * at for at in range(200)]
    for _ in range(30):
        for at, result in enumerate(many(values)):
            assert np.all(result.numpy() == at * sdp.size())


def case_mixed_precision_scales_and_descends():
    if not hasattr(tf.keras, "mixed_precision"):
        return "no mixed precision in this Keras"
    made = model()
    inner = tf.keras.optimizers.SGD(0.01)
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner)
    optimizer = sdp.DistributedOptimizer(optimizer)
    inputs, targets = data()
    losses = []
    for _ in range(10):
        with tf.GradientTape() as tape:
            loss = loss_of(made, shard(inputs[0]), shard(targets[0]))
            scale = getattr(optimizer, "scale_loss", None) or optimizer.get_scaled_loss
            scaled = scale(loss)
        gradients = tape.gradient(scaled, made.trainable_variables)
        if hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, made.trainable_variables))
        losses.append(float(sdp.oob_allreduce(loss)))
    assert losses[-1] < losses[0]
    assert len(set(sdp.get_worker_comm().allgather(weights(made).tobytes()))) == 1
    return None


def case_ranks_that_disagree_on_gradients_raise_before_a_variable_changes():
    """Variables of one shape: the sums of different ones would pass for gradients."""
    if sdp.size() == 1:
        return "one rank agrees with itself"
    used, unused = tf.Variable(tf.ones([4, 2])), tf.Variable(tf.ones([4, 2]))

    def dense(variable):
        return tf.reduce_sum(variable * variable)

    def rows(variable):
        return tf.reduce_sum(tf.gather(variable, [1, 2]) ** 2)

    def gradients(agree, loss_of, sparse_as_dense):
        mine = used if agree or sdp.rank() == 0 else unused
        with tf.GradientTape() as tape:
            loss = loss_of(mine)
        tape = sdp.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense)
        for variable, gradient in zip((used, unused), tape.gradient(loss, [used, unused])):
            if gradient is not None:
                variable.assign_sub(tf.convert_to_tensor(gradient))

    for loss_of, sparse_as_dense in ((dense, True), (rows, True), (rows, False)):
        for made in (gradients, tf.function(gradients)):
            for agree in (False, True):
                used.assign(tf.ones([4, 2]))
                try:
                    made(agree, loss_of, sparse_as_dense)
                    error = ""
                except tf.errors.InvalidArgumentError as raised:
                    error = str(raised)
                absent = [1] if sdp.rank() == 0 else [0]
                assert agree or f"disagree on which of 2 variables have a gradient: on rank {sdp.rank()} " in error
                assert agree or f"none, by position: {absent}" in error, error
                expected = np.ones([4, 2])
                expected[slice(1, 3) if loss_of is rows else slice(None)] -= 2 * agree
                np.testing.assert_array_equal(used.numpy(), expected)
                np.testing.assert_array_equal(unused.numpy(), np.ones([4, 2]))
    return None
