"""CPU optimizer steps over pages: one fused pass per element, on a thread pool of its own.

A page is a set of flat arrays of one length (gradient, parameter, moments) in which many parameters
lie one after the other. A `Segment` names one parameter's range and its hyper-parameters; one
`ThreadPool.submit` updates a whole page:

    pool = ThreadPool()
    ticket = pool.submit(Update(
        grad=grads, parameter=master, copy=bf16_params, first_moment=m, second_moment=v,
        segments=[Segment(0, 4096, 0), Segment(4096, 512, 1)],
        hypers=[AdamW(lr=3e-4, weight_decay=0.1, step=7), AdamW(lr=3e-4, step=7)],
    ))
    ...                               # the GIL is free meanwhile
    bad = ticket.result().nonfinite   # segments with a non-finite gradient

A non-finite gradient or state makes its element non-finite and stays there; every NaN that is stored is
0x7FC00000. Results are the same bits on every instruction set, with any number of threads, chunk size,
offset and alignment. Jobs of one pool behave as if they ran in the order of submission.

Arrays are contiguous CPU tensors, or `Span`s (an address, a dtype and a count) for memory that no
tensor describes. They must not be touched until the ticket is done; the pool keeps them alive.
"""

from infinity.cpu_adam.form import UpdateForm
from infinity.cpu_adam.hyper import SGD, Adagrad, Adam, AdamW, Hyper, NativeHyper
from infinity.cpu_adam.placement import default_cpus
from infinity.cpu_adam.pool import DEFAULT_CHUNK, ThreadPool, Ticket, runnable_isas
from infinity.cpu_adam.work import (
    BLOCK,
    CODE_BLOCK,
    Array,
    Gradient,
    GradientResult,
    Segment,
    Span,
    Stream,
    Update,
    UpdateResult,
    sum_in_order,
)

__all__ = [
    "BLOCK",
    "CODE_BLOCK",
    "DEFAULT_CHUNK",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Array",
    "Gradient",
    "GradientResult",
    "Hyper",
    "NativeHyper",
    "Segment",
    "Span",
    "Stream",
    "ThreadPool",
    "Ticket",
    "Update",
    "UpdateForm",
    "UpdateResult",
    "default_cpus",
    "runnable_isas",
    "sum_in_order",
]
