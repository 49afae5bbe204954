"""The constants of `esp` and `infinite`: neither an operator's choices nor measured times.

`PolicyConfig` has the operator's choices, and the cost model the times of a machine. Shares are fractions of
the whole that their line names.
"""

# Admission and deferral
PLANNED_TTFT_SHARE = 0.9  # of a TTFT target: the planned time to the first token
MISSED_DEADLINE_WEIGHT = 4  # a prompt past its deadline counts as this many times as long in a choice
USABLE_SPEED_SHARE = 0.8  # of the cluster's prefill speed; decodes and the ends of steps take the rest
MAX_CONSIDERED = 512  # waiting prompts in a plan: the oldest and the newest half
MAX_CONSIDERED_PER_INSTANCE = 2  # the same limit of a large cluster
STARVATION_FACTOR = 4  # TTFT targets after which no other prompt may pass one that finds no room
LONG_PROMPT_STEPS = 8  # steps of one instance, beyond which a prompt is long
MIN_ON_TIME_SHARE = 0.25  # of a step of all instances: with less on-time work, late prompts run as well

EXPECTED_SHARE = 0.9  # of the outputs so far that end by the length expected of a request

# Steps and chunks
MAX_STEP_SECONDS = 2.0  # of a step of prompts, beyond which longer ones are hardly more efficient
MAX_LONE_SECONDS = 30.0  # of a step on processors with all of the only request's prompt
MAX_STEP_SHARE = 0.35  # of the least TTFT target: the longest step of prompts, after which another may follow
PLANNED_TPOT_SHARE = 0.85  # of a TPOT target: the planned time of a step with decodes
MIN_TPOT_SHARE = 0.5  # of a TPOT target: the least time of such a step, however late its decodes are
MIN_CHUNK_TOKENS = 16  # of some prompt in every step, in any case
MIN_CHUNK_SHARE = 0.05  # of a step's budget: a chunk that is cut shorter costs more than it is worth
CHUNK_TOLERANCE = 0.02  # of a step's budget that the search for a chunk's size may leave unused
MAX_CHUNK_GUESSES = 12  # of that search
MAX_OVERHEAD_SHARE = 0.5  # of a step of prompts: beginning it; a shorter step would delay everybody
MIN_OVERHEAD_SHARE = 0.1  # of the same, below which a step is not longer than its bound
MAX_READING_SHARE = 0.125  # of a step of prompts, for reading the history of the first prompt

# Prompts and decodes in turn
INTERLEAVING_GAIN = 1.1  # speed of prompts alone over their speed in mixed steps, from which they alternate
MIN_PREFILL_SHARE = 0.2  # of the time, while decodes can be in time
HOPELESS_PREFILL_SHARE = 0.5  # of the time, where decodes cannot be in time in any case

# Decode leases
LONG_LEASE_FACTOR = 8  # times the usual number of steps, where no prompt waits
LONG_LEASE_KV_SHARE = 0.5  # of the free slots, so that the next prompt finds room
MAX_EXTENSION_FACTOR = 4  # long leases in one: accounting and pictures see a lease only when it is over
MIN_LIVE_SHARE = 0.75  # of a lease's requests that still run when it is extended: others keep their KV
MAX_PLANNING_SHARE = 0.3  # of the engine's time for planning when all instances decode
LEASE_START_SHARE = 0.2  # of a lease and the prompts after it, for sending its decodes
MAX_BATCHING_WAIT = 0.1  # of the TTFT target that short prompts wait to be batched

# Lent room
LENT_BLOCK = 16  # tokens of KV that move at least, and in multiples, so that their messages are worth it
MOVED_PER_STEP = 16  # tokens of a debtor's KV that move under each step where moves are paced
CREDITOR_MEMORY_SHARE = 0.8  # of an instance's memory in use, up to which it lends (`infinite-paper`)
LEAST_SWAP = 8  # blocks of debts along a cycle that are worth to be swapped home

# Memory instances
LEAST_FREE_SHARE = 0.25  # of a pool: while less is free, requests that wait count in the price of `esp`
KEPT_KV_SHARE = 0.5  # of the pool of a full instance: while more is in use, KV of decodes moves away
MOVED_TAIL = 16  # tokens of a request that move at least
MICRO_BATCHES = 2  # of a lease at most, unless an operator says more: one computes while one is attended
LEAST_PIECE = 1024  # tokens of a request that waits for a move, or of room that is given back: at a time
PIECE_SECONDS = 0.02  # of such a move at most, unless it is the least

# Failures
MAX_PIECES = 64  # of a request's KV, with the gaps between them: the time of a plan is quadratic in them
MAX_LOSSES = 3  # instances lost in a row at the same positions of a request; then the request fails
MAX_OTHER_LOSSES = 3  # since its arrival, each of which lets the row be longer by one
