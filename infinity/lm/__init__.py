"""Language modelling: a language model, real text to train it on, and measures of what the model learned.

A user could have written all of this code on top of `infinity.offload`.
"""
