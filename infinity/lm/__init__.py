"""The main job: a language model, real text for it, and what shows that it learned.

Everything here is code that a user could have written on top of `infinity.offload`.
"""
