"""The main job: a language model, real text to train it on, and measures of what it learned.

Everything here is code that a user could have written on top of `infinity.offload`.
"""
