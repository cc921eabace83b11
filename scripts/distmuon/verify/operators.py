"""torch's collectives by the names of their operators; c10d is what torch calls its library of them.

Whoever reads them, at the dispatcher or in a trace, takes a name that is not here for an error: a silent gap would make
every count worthless. No torch needed.
"""

# torch operator -> (collective, which argument holds the payload as the ledger defines it)
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "returned"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
}
WITHOUT_PAYLOAD = {
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}
