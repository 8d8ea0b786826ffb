"""CPU optimizer steps over pages: one fused pass over all arrays of a page, on a pool of threads.

A page is a set of flat arrays of one length (gradient, parameter, moments) in which many parameters lie one
after the other. A `Segment` gives the range of one parameter and its hyper-parameters. One call of
`ThreadPool.submit` updates a whole page:

    pool = ThreadPool()
    ticket = pool.submit(Update(
        grad=grads, parameter=master, copy=bf16_params, first_moment=m, second_moment=v,
        segments=[Segment(0, 4096, 0), Segment(4096, 512, 1)],
        hypers=[AdamW(lr=3e-4, weight_decay=0.1, step=7), AdamW(lr=3e-4, step=7)],
    ))
    ...                               # the GIL is free meanwhile
    bad = ticket.result().nonfinite   # segments with a non-finite gradient

An element with a non-finite gradient or state becomes non-finite and remains so. Every NaN is stored as
0x7FC00000. Results have the same bits on every instruction set, with any number of threads, and for any chunk
size, offset and alignment. The jobs of one pool behave as if they ran in the order of submission.

Arrays are contiguous CPU tensors, or `MemorySpan` objects. The pool keeps them alive. The caller must not use
them until the ticket is done.
"""

from infinity._cpu_adam import UpdateForm, UpdateTicket
from infinity.cpu_adam.placement import default_cpus
from infinity.cpu_adam.pool import DEFAULT_CHUNK, ThreadPool, Ticket, Tickets, form_of, runnable_isas
from infinity.cpu_adam.work import (
    AVERAGED,
    BLOCK,
    CODE_BLOCK,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Array,
    AverageStep,
    Gradient,
    GradientResult,
    Hyper,
    Lion,
    MemorySpan,
    NativeHyper,
    Segment,
    Stream,
    Update,
    UpdateResult,
)

__all__ = [
    "AVERAGED",
    "BLOCK",
    "CODE_BLOCK",
    "DEFAULT_CHUNK",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Array",
    "AverageStep",
    "Gradient",
    "GradientResult",
    "Hyper",
    "Lion",
    "MemorySpan",
    "NativeHyper",
    "Segment",
    "Stream",
    "ThreadPool",
    "Ticket",
    "Tickets",
    "Update",
    "UpdateForm",
    "UpdateResult",
    "UpdateTicket",
    "default_cpus",
    "form_of",
    "runnable_isas",
]
