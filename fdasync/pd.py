"""Where instances and routers were."""

raise ImportError("moved to fdasync_fleet: in a checkout, pip install ./plugins/fdasync-fleet", name=__name__)
