def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes longer than the default run should")
