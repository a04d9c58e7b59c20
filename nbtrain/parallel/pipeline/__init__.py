"""Pipeline parallelism: each rank runs the model's own forward, with only its stages' modules in it.

::

    units       modules that are called as a whole: blocks, embeddings, norms, the head
    skeleton    the code around them, which every rank runs
    score       which units a forward calls, in which order, and which of their outputs others read
    rehearsal   finds it: units are run by twins without weights, what comes from where is tracked
    partition   where the score is cut into stages
    holding     a rank keeps the parameters of its stages
    flow        one forward of one stage on one microbatch
    stage       the same under torch's schedule runtime, with what is sent and received
    graph       which gradients of weights can wait, where backward is taken apart
    pipeline    a whole step; ties and reduction: what becomes of gradients
"""
