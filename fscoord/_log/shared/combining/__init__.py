"""Combined writes: the processes of one host hand their writes to a leader, which appends all of them in one write.

On a mount that hosts share, each hold of the log's lock costs several round trips to the file server. So usually only
one process of the host, the leader, takes the lock. The processes of the host that want to write meanwhile publish
requests. The leader takes the lock once, reads to the end, claims the requests, decides them, and appends all records
in one write(2). Each record names the session that requested the record. Any writer may become the leader, and leads
for one hold of the lock. There is no daemon.

Terms: the *author* of an operation is the thread that wants to write. It becomes the *leader* if it gets the *seat*, a
lock between the processes of the host. Otherwise it is a *follower*: it publishes a request and waits for an *answer*.

- `request`: requests and answers as bytes. Pure.
- `outcomes`: finds the record of a request among the records that the handle reads.
- `station`: the files, the seat and the sockets of a host.
- `batch`: decides what one hold of the log's lock appends, and which requests it claims.
- `combiner`: the protocol, from the author of an operation to its result.

Safety depends only on the log's lock and on unlink(2) of a request, which succeeds for exactly one process. Everything
else on the host (the seat, the answers) may be lost, delayed or duplicated. A leader claims a request only while it
holds the log's lock and has read to the end. The claim ends when the leader releases the lock. An author that receives
no answer takes the log's lock, and searches the log for the record of its request.

Nothing here interprets keys or values: a `Decider` of the store decides. A follower holds no lock while it waits for an
answer. A leader holds the process mutex and the log lock while it claims.
"""
