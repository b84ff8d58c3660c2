# ruff: isort: skip_file
from rollout.integrations.verl import (
    VerlInteraction as VerlInteraction,
    load_verl_interactions as load_verl_interactions,
)
from rollout.interactions.interaction import (
    Interaction as Interaction,
    InteractionContext as InteractionContext,
    InteractionFactory as InteractionFactory,
    InteractionRegistry as InteractionRegistry,
    InteractionTurn as InteractionTurn,
)
from rollout.interactions.model_user import ModelUser as ModelUser
from rollout.interactions.scripted import ScriptedUser as ScriptedUser
from rollout.interactions.verifier import Verifier as Verifier
