"""Weights from a trainer to whoever serves them: published by every rank of one job, installed by every rank of another.

::

    trainer rank            publish: snapshot and cast, then go on training
       | offers boxes           |
    roll call  (rank 0)     who is here, with which boxes of which tensors -> a plan -> a version moves -> digests -> a vote
       | wants boxes            |
    server rank             staged beside the weights; poll says that a whole version is there, install copies it

Both jobs meet at one address, that of the trainer's rank 0, with one secret. A rank receives the boxes it wants and nothing else. A version
is offered for installation once every server rank has all of it and its digests hold: together or not at all. When somebody dies, the
rest meet again, plan anew and go on; no process ends.
"""

from .channel import SyncError
from .member import offered
from .publisher import Publisher
from .rollcall import MapError
from .subscriber import Slot, Subscriber

__all__ = ["MapError", "Publisher", "Slot", "Subscriber", "SyncError", "offered"]
