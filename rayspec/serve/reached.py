"""The replicas to which this process sends requests, as its routers know them.

Serve makes the routers itself, by the name of their class, and gives no access to them. So they are known here.
"""

from __future__ import annotations

import threading
import weakref

from ray.serve.request_router import RequestRouter

_routers: weakref.WeakSet[RequestRouter] = weakref.WeakSet()
_lock = threading.Lock()


def add(router: RequestRouter) -> None:
    with _lock:
        _routers.add(router)


def replicas_of(app: str, deployment: str) -> set[str]:
    """Return the actor names of a deployment's replicas to which this process sends requests now."""
    with _lock:
        routers = list(_routers)
    known = [replica for router in routers for replica in list(router.curr_replicas)]
    return {
        replica.to_full_id_str()
        for replica in known
        if (replica.deployment_id.app_name, replica.deployment_id.name) == (app, deployment)
    }
