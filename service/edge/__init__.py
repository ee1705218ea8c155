"""The gRPC edge: messages in, values out, errors as statuses. No rule of the application is decided here."""
