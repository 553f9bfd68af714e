"""Roles on a Ray cluster; the only folder that imports Ray.

Ray places roles, carries data between machines and says who has died. Each role has a *seat*: a Ray
actor that runs the role in a child process of its own and speaks Ray for it. So a role knows
nothing of Ray, has the main thread and its own number of threads, and its end is known exactly:
the seat is its parent.

    role ◀─socket─▶ seat ◀─Ray─▶ seat ◀─socket─▶ role

What roles share lives in a *place* inside one of the seats, beside the role that reads it: a queue
at its learner, a parameter store at its writer, a group at its first learner. Shared parameters
have an actor of their own.

| module | what |
|---|---|
| `lines` | a role's socket to its seat, and its process; no Ray |
| `ends` | the ends that roles hold; no Ray |
| `places` | what a seat keeps for others to come to; no Ray |
| `seats` | the Ray actor of a role |
| `servers` | the Ray actor of shared parameters |
| `served` | those parameters; no Ray |
| `runtime` | the `Runtime` |
"""
