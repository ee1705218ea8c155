"""Run by alembic with the connection that `service.state.engine` or `make migration` hands over."""

from alembic import context

from service.state.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
