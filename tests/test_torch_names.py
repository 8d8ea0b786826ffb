"""Tests of the names of torch on which the package stands although torch does not document them.

Each may go with the next torch. `REPLACEMENTS` says what takes its place then. A name that is used must stand
there, and one that is not used must not.
"""

from __future__ import annotations

import ast
import importlib
from functools import reduce
from pathlib import Path

import pytest
import torch

import infinity

PACKAGE = Path(infinity.__file__).parent

REPLACEMENTS = {
    "torch._C.DisableTorchFunctionSubclass": "torch.Tensor.__torch_function__'s own context, by super()",
    "torch._C._current_graph_task_id": "a flag that a hook on the roots sets",
    "torch._C._autograd._top_saved_tensors_default_hooks": "a stack of our own beside saved_tensors_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks": "saved_tensors_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "saved_tensors_hooks",
    "torch._C._len_torch_function_stack": "a refusal of torch function modes in runtime.accumulate",
    "torch._C._get_function_stack_at": "a refusal of torch function modes in runtime.accumulate",
    "torch._C._pop_torch_function_stack": "the mode's own exit, without forwards that Ctrl-C ends",
    "torch._C._push_on_torch_function_stack": "the mode's own exit, without forwards that Ctrl-C ends",
    "torch._C._len_torch_dispatch_stack": "a refusal of torch dispatch modes in runtime.accumulate",
    "torch._C._functorch.peek_interpreter_stack": "a refusal of torch.func's transforms",
    "torch._C._DisableFuncTorch": "a refusal of torch.func's transforms",
    "torch._functorch": "a refusal of torch.func's transforms of a paged model",
    "torch._C._functions": "the class of the node of a leaf's gradient edge",
    "torch._C._current_autograd_node": "the node that a hook's own registration knows",
    "torch._C._stash_obj_in_tls": "a note for each torch._C._current_graph_task_id",
    "torch._C._get_obj_in_tls": "see _stash_obj_in_tls",
    "torch._C._is_key_in_tls": "see _stash_obj_in_tls",
    "torch._C._remove_obj_from_tls": "see _stash_obj_in_tls; torch 2.6 has none",
    "torch.Tensor._make_wrapper_subclass": "a tensor on the meta device that reports another device",
    "torch._C._storage_Use_Count": "a weak reference to the Storage",
    "torch.UntypedStorage._new_with_weak_ptr": "a weak reference to the Storage",
    "torch._C._swap_tensor_impl": "torch.utils.swap_tensors, for tensors without weak references",
    "torch._C._functorch.is_functorch_wrapped_tensor": "a refusal of torch.func's transforms",
    "torch._neg_view": "torch.neg, with a copy",
    "torch._has_compatible_shallow_copy_type": "parameters that are replaced, where dtype or device changes",
    "torch._cudnn_rnn_flatten_weight": "nothing: torch would no longer call it",
    "torch._subclasses.fake_tensor": "the meta device, which lacks a device of its own for each tensor",
    "torch._compile._disable_dynamo": "torch.compiler.disable, which imports torch._dynamo at once",
    "torch._dynamo.exc": "a RuntimeError that torch.compile raises",
    "torch._dynamo.trace_rules": "torch.compiler.disable on every function that hooks call",
    "torch.utils._pytree": "optree",
    "torch.utils._python_dispatch.TorchDispatchMode": "its public name, once torch gives one",
    "torch.utils._device.DeviceContext": "the class of torch.get_default_device()'s mode",
    "torch._C._distributed_c10d": "the names of the stores in torch.distributed",
    "torch.distributed.distributed_c10d._get_default_store": "a TCPStore of our own at MASTER_ADDR",
    "torch.autograd.Variable._execution_engine": "torch.autograd.graph, once it queues callbacks",
}
"""Name of torch -> what replaces it if it goes."""


def used() -> dict[str, str]:
    """Private names of torch in the package -> one of the files that use it."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        aliases = {"torch": "torch"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {each.asname: each.name for each in node.names if each.asname}
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{each.name}" for each in node.names]
                aliases |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            else:
                continue
            found |= {name: str(path.relative_to(PACKAGE)) for name in map(private, names) if name}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := private(dotted(node, aliases))):
                found[name] = str(path.relative_to(PACKAGE))
    return found


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """The name that an expression like torch.nn.Linear spells, or "" for any other expression."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if not isinstance(node, ast.Attribute):
        return ""
    before = dotted(node.value, aliases)
    return f"{before}.{node.attr}" if before else ""


def private(name: str) -> str:
    """The entry of `REPLACEMENTS` to which a name of torch belongs, or the name itself if there is none.

    Returns "" for a public name.
    """
    parts = name.split(".")
    hidden = [each.startswith("_") and not each.startswith("__") for each in parts]
    if parts[0] != "torch" or not any(hidden):
        return ""
    return next((known for known in REPLACEMENTS if name == known or name.startswith(f"{known}.")), name)


def test_every_private_name_of_torch_has_a_replacement() -> None:
    modules = {name.rpartition(".")[0] for name in REPLACEMENTS}
    found = {name: file for name, file in used().items() if name not in modules and name != "torch._C"}
    assert {name: file for name, file in found.items() if name not in REPLACEMENTS} == {}
    assert sorted(REPLACEMENTS.keys() - found.keys()) == []


OPTIONAL = {"torch._C._remove_obj_from_tls", "torch._C._autograd._top_saved_tensors_default_hooks"}
"""Names that older releases lack, for which the package has another way itself."""


@pytest.mark.parametrize("name", sorted(REPLACEMENTS.keys() - OPTIONAL))
def test_this_torch_has_the_name(name: str) -> None:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        reduce(getattr, parts[count:], module)
        return
    pytest.fail(f"torch {torch.__version__} has no {name}")
