"""Checkpoints of a trainer, which any plan on any number of ranks can take: on torch.distributed.checkpoint (DCP).

::

    folder     numbered directories, `latest`, what crashes leave behind
    contents   what a checkpoint has beside tensors
    storage    pieces of tensors as DCP's items: who writes what, who reads what
    saving     save: all ranks or none, now or behind the training
    loading    load: everything fits, or nothing is changed
    weights    one safetensors file of the model
"""
