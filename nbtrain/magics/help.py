"""What ``%distributed?`` prints."""

HELP = """Interactive distributed training.

    %distributed start -n 4             start 4 ranks (optional: the first %%distributed cell starts them)
    %distributed                        what runs where
    %distributed stop                   end the ranks; nothing is left behind

    %%distributed                       run the cell on all ranks
    print(rank, world_size)

    %%distributed -r 0,2-3              on these ranks only
    %%distributed -o losses             the last expression's values, a list by rank, in the notebook
    %%distributed --push data           send the notebook's `data` to the ranks first

On every rank these names are there: rank, world_size, local_rank, device, mesh, dist, torch, nt. Code written for
torchrun works too: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are in the environment.

A training job in one cell
    %%distributed -n 4 --plan zero=3 --parallelize model
    class Net(torch.nn.Module): ...
    model = Net()                       # after the cell `model` is sharded, and a table says what each rank holds

Options of %%distributed
    -n N                  start with N ranks if none runs
    -r, --ranks SPEC      the ranks that run it: 0   0,2   1-3   -1   all   even   odd
    -o, --out NAME        the values of the last expression, by rank; tensors arrive as NumPy arrays
    --push a,b            these names of the notebook go to the ranks first
    --plan SPEC           e.g. zero=3,precision=bf16; bound to `plan` on the ranks
    --parallelize NAMES   after the cell these modules are replaced by their parallel form
    --local               run the cell in the notebook too, after the ranks
    --no-block            return at once; the cell's state is shown below it
    --name NAME           bind the handle of a --no-block cell: NAME.wait(), .result(), .interrupt(), await NAME
    --timeout S           interrupt the cell after S seconds

Verbs of %distributed
    start [-n N] [--gpus 0,1] [--backend auto|gloo|nccl] [--threads T] [--launcher local|spawn|NAME]
          [--hang-after S]   from so many seconds without output on, a card shows who waits for whom (10)
    status                the ranks: device, state, memory, process
    stop                  end the ranks
    restart [options of start]   end them and start again; what they held is lost
    restart --ranks RANKS [--replay]   replace these only; trainers go on, and with --replay imports, functions and
                          classes of earlier cells are there again
    interrupt [-r RANKS]  stop what they run, as Ctrl-C would; the second time, replace what does not answer
    where                 each rank's line and the collective that it waits in, also while ranks are busy or stuck
    guard cells|on|off    compare what ranks call before a collective: in cells (the default), everywhere, or never
    debug [-r RANKS]      after an error: a debugger on the rank that failed first, in the cell; q ends it
    push NAMES [-r RANKS]        names of the notebook go to the ranks
    pull NAMES [-r RANKS]        names of the ranks come to the notebook, each a list by rank
    auto on|off           run every cell on the ranks; one that begins with %%local runs in the notebook

input(), getpass() and breakpoint() work in a cell: each rank that asks does so in turn, in the cell. Others wait for it
meanwhile, and --timeout does not count. A cell that would hang, since a collective is not reached by all ranks, is
named below it before it runs ("lint, line 3: ...").

In Python (import nbtrain as nt) the same verbs are methods of nt.Session; nt.session() is the one that runs.
"""
