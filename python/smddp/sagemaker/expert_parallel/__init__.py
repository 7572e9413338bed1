"""Expert parallelism: each rank of an expert group holds some experts of every layer, and tokens travel to them.

families   what each family of models calls its router and its experts, and how it weighs what it chose
spread     from a model to one whose experts are spread over the group (`tsm.transform` calls it)
router     the model's own router, with the choice of experts balanced
balancing  the ways to balance: sinkhorn, aux_loss, balanced, none; and the z-loss
dispatch   which token goes to which rank, and the way back; by all-to-all or by all-gather
exchange   the collectives of a dispatch, as autograd functions
experts    the experts of one rank
fsdp       how FSDP shards experts: over the ranks that hold the same ones
"""

__all__: list[str] = []
