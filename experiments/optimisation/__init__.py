"""Networks that solve optimisation problems: quadratic programs and optimal power flow."""
