"""Where formats of rows were."""

raise ImportError("moved to fdasync_trainer.rows: in a checkout, pip install ./plugins/fdasync-trainer", name=__name__)
