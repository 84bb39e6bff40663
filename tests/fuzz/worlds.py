"""All worlds by name."""

from tests.fuzz.checkpoint_life import CheckpointLife, CheckpointLifeRemote
from tests.fuzz.elastic_life import ElasticLife
from tests.fuzz.machine import World
from tests.fuzz.member_life import MemberLife

WORLDS: dict[str, type[World]] = {
    world.name: world for world in (CheckpointLife, CheckpointLifeRemote, ElasticLife, MemberLife)
}
