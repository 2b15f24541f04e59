"""Write an environment as two functions, check it and train on it: park a cart at 0 with three thrusts."""

import jax
import jax.numpy as jnp

import jaxrl


def reset(key):
    place = jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
    return (place, 0.0 * place), jnp.stack([place, 0.0 * place])


def step(state, action, key):
    place, speed = state
    speed = 0.9 * speed + 0.1 * (action - 1) + 0.01 * jax.random.normal(key)
    place = place + 0.2 * speed
    lost = jnp.abs(place) > 3.0
    return (place, speed), jaxrl.TimeStep(jnp.stack([place, speed]), 1.0 - jnp.abs(place), lost)


def make_cart(length: int = 60) -> jaxrl.Env:
    spec = jaxrl.EnvSpec("Cart", jaxrl.Box(-4.0, 4.0, (2,)), jaxrl.Discrete(3), time_limit=length)
    return jaxrl.Env(spec, reset, step)


def main(max_opts: int = 3_200, eval_interval: int = 800) -> float:
    env = make_cart()
    assert jaxrl.check_env(env) == []
    strategy = jaxrl.on_policy(env, jaxrl.ppo(lr=1e-3), num_envs=16)
    result = jaxrl.Trainer(strategy, max_opts=max_opts, eval_interval=eval_interval).train()
    print("best score", result.best_score)
    return result.best_score


if __name__ == "__main__":
    main()
