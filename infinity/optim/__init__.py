"""The optimizer: the updates of chunks, the scheduler that decides their order and their memory, and
`runtime.optimizer`, which gives them the interface of torch's optimizers.
"""
