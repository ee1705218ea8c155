"""modelpress: make a trained model smaller and faster, prove what it cost, ship it signed.

    import modelpress

    with modelpress.Client("localhost:8471") as client:
        conversion = client.submit(request)
        done = client.wait(conversion.name)

Nothing in this package imports torch: it is what training environments install.
"""

__version__ = "0.1.0"
