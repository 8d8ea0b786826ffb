"""The optimizer: chains (each is the update of one chunk of parameters), the order in which chains run, and
`runtime.optimizer`, which gives them the interface of torch's optimizers.
"""
