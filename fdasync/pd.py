"""Where instances and routers were."""

raise ImportError("instances and routers are fdasync_fleet: pip install fdasync-fleet", name=__name__)
