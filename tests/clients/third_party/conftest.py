def pytest_configure(config):
    config.addinivalue_line("markers", "clients: needs the packages of requirements-clients.txt")
