"""Training on several machines: a replicated ledger of the batches that each of them trains.

Machines average in *rounds*. In each round every machine gathers the same
:class:`~coordinator.cluster.machine_report.MachineReport` of all and derives from them the same
:class:`~coordinator.cluster.cluster_ledger.ClusterLedger`: the batches in the global parameters,
and the grants until the next commit. No machine assigns work to the others, so any of them may
die. The ledger changes only when a round is committed. A machine that missed a commit receives
another machine's state, and the batches it trained since its own last commit are open again.
:class:`~coordinator.cluster.member.Member` is one machine's part in the rounds, without clock,
thread, socket or tensor: a generator of actions, which is sent their results.

A grant ends with the next commit: its trained batches are consumed, those that the machine keeps
move into its next grant, and the rest is open again.

Engines only count commits, so two machines may commit different rounds under one number. Each
commit therefore extends a hash chain, the *lineage*. If lineages differ, no round is committed:
all machines select the same history, and those with another one are healed from it.
"""
