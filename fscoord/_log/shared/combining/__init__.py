"""Combined writes: the processes of one host hand their writes to a leader, which appends all of them in one write.

On a mount that hosts share, each hold of the log's lock costs several round trips to the file server. So a process
publishes a request if it is to write while another process of its host is about to write. The leader takes the lock
once, reads to the end, claims the requests, decides them, and appends all records in one write(2), each in the name of
the session that requested it. Any writer may lead, for one hold of the lock. There is no daemon.

- `request`: requests and answers as bytes. Pure.
- `outcomes`: recognises the record of a request when it is read. `station`: the files, the seat and the sockets of a
  host.
- `batch`: the plan of one hold of the log's lock: which requests it claims, and which records it appends.
- `combiner`: the protocol, from the author of an operation to its result.

Safety rests on two things only: the log's lock, and unlink(2) of a request, which succeeds for exactly one process.
Everything else on the host (the seat, the answers) may be lost, delayed or duplicated. A request is claimed only by the
holder of the log's lock that has read to the end, and a claim ends with that hold. An author that receives no answer
looks for its record in the log, under the log's lock.

Nothing here interprets keys or values: a `Decider` of the store decides. A follower holds no lock while it waits for an
answer. A leader holds the process mutex and the log lock while it claims.
"""
