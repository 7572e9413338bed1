"""Delayed parameter initialization: a model built on the meta device gets its values while it is sharded.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    delayed = DelayedParamIniter(model)
    with delayed.validate_params_and_buffers_inited():
        model = FSDP(
            model,
            param_init_fn=delayed.get_param_init_fn(),
            post_param_init_fn=delayed.get_post_param_init_fn(),
            ...,
        )

With FSDP2, tensor parallelism alone, or one process:

    delayed = DelayedParamIniter(model)     # before or after fully_shard(model)
    with delayed.validate_params_and_buffers_inited():
        delayed.materialize()

The values depend on the random seed and on the parameters' names alone: the same model comes out at every world size,
sharding degree and tensor-parallel degree, under FSDP1 and FSDP2. They are not those of a model that is built without
the meta device, whose parameters are drawn one after another from one stream; they are as random, from the same
distributions. For equal values in one process, build on meta and call `materialize` there, too.
"""

from smddp.sagemaker.delayed_param.initer import DelayedParamIniter

__all__ = ["DelayedParamIniter"]
