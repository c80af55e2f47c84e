"""Which release a user is served: a stable hash of tenant and user against the shares in force. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ostinato.core.arm_assignment import ANONYMOUS, Dealing, branch_of, dealing_key, place_of
from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A user's arm and the probability with which a random user gets that arm.

    Example: ``Assignment(arm=Arm.LIVE, propensity=0.8)``
    """

    arm: Arm
    propensity: float


def slot_of(tenant: str, arm: Arm) -> str:
    """The slot with the weights that answer a tenant's people of an arm."""
    return {Arm.BRANCH: branch_of(tenant), Arm.SHARED: Arm.LIVE.value}.get(arm, arm.value)


class Arms:
    """Deals users to arms.

    Control takes a fixed share of the users by a hash of tenant and name; those users stay on it. A share `learner` of the others, by a
    hash of its own, follows training for good and takes part in no comparison. The verified release takes its share of the others by a
    further hash. The remaining users are dealt by a last hash, salted for the current trial: canary takes its lower end, the previous
    release its upper end, and live the rest.

    The people of a tenant in `branches` take no part in any of this, so that the arms that are compared with each other serve the same
    tenants. A share `holdout` of those in `trained`, by the hash of control, stays on live as the arm `shared`; so do all while no branch
    is loaded.

    Raises:
        BadConfig: the control share lies outside [0, 1].
    """

    def __init__(
        self,
        *,
        control: float = 0.0,
        learner: float = 0.0,
        salt: str = "ostinato",
        branches: Collection[str] = (),
        trained: Collection[str] = (),
        holdout: float = 0.0,
    ) -> None:
        if not 0.0 <= control <= 1.0:
            raise BadConfig(f"serve.control_share {control} must lie in [0, 1].")
        self._control = control
        self._learner = learner
        self._key, self._learner_key = dealing_key(salt), dealing_key(f"learner {salt}")
        self._branches, self._trained, self._holdout = frozenset(branches), frozenset(trained), holdout
        self._dealing: Dealing | None = None
        self._trial_key = self._verified_key = b""

    def deal(self, dealing: Dealing | None) -> None:
        """Set the shares that are in force from now on, or None if there is no trial."""
        if dealing != self._dealing:
            self._dealing = dealing
            self._trial_key = b"" if dealing is None else dealing_key(dealing.salt)
            self._verified_key = b"" if dealing is None else dealing_key(f"verified {dealing.verified_salt}")

    def releases(self, loaded: Mapping[str, PolicyVersion]) -> frozenset[str]:
        """The loaded slots that hold a release of their own. Canary and previous do only while the ledger deals users of the trial to them
        and their weights differ from live's: between trials both hold the live weights, and so does canary until the candidate loads.
        """
        dealing = self._dealing or Dealing(salt="")
        tried = {Arm.CANARY: dealing.canary > 0.0, Arm.PREVIOUS: dealing.previous > 0.0}
        live = loaded.get(Arm.LIVE)
        return frozenset(
            slot
            for slot, policy in loaded.items()
            if slot not in tried or (tried[Arm(slot)] and (live is None or policy.hash != live.hash))
        )

    def compared(self, loaded: Mapping[str, PolicyVersion]) -> frozenset[str]:
        """The hashes of the weights that a trial compares: live's, and those that people are dealt to beside it; none without a trial."""
        beside = self.releases(loaded) & {Arm.CANARY, Arm.PREVIOUS}
        return frozenset(loaded[slot].hash for slot in (*beside, Arm.LIVE) if slot in loaded) if beside else frozenset()

    def beside(self, arm: Arm, loaded: Mapping[str, PolicyVersion]) -> frozenset[str]:
        """The hashes of the weights with whose people an arm's are compared, in a trial or for `release.best_arm`, its own included."""
        compared, measured = self.compared(loaded), (Arm.LIVE, Arm.VERIFIED)
        dealt = self._dealing is not None and self._dealing.verified > 0.0 and Arm.VERIFIED in loaded
        if dealt and arm in (*measured, Arm.CANARY, Arm.PREVIOUS):
            compared |= {loaded[slot].hash for slot in measured if slot in loaded}
        return compared

    def styled(self, tenant: str, arm: Arm, loaded: Mapping[str, PolicyVersion]) -> set[PolicyVersion]:
        """The versions that a style must be approved for to be dealt to an arm's people; none for control's, who have no style."""
        policy, beside = loaded.get(slot_of(tenant, arm)), self.beside(arm, loaded)
        if policy is None or arm in (Arm.CONTROL, Arm.OUTSIDE):
            return set()
        return {policy, *(each for each in loaded.values() if each.hash in beside)}

    def assign(self, tenant: str, user: str, loaded: Collection[str]) -> Assignment:
        """The arm of a tenant's user, given the loaded slots. The share of an arm without weights goes to live."""
        if tenant in self._branches:
            return self._of_branch(tenant, user, loaded)
        if user == ANONYMOUS:  # many people behind one name: hashing it would move them all together
            return Assignment(arm=Arm.LIVE, propensity=1.0)
        control = self._control if Arm.CONTROL in loaded else 0.0
        if control and place_of(self._key, tenant, user) < control:
            return Assignment(arm=Arm.CONTROL, propensity=control)
        learner = self._learner if Arm.LEARNER in loaded else 0.0
        if learner and place_of(self._learner_key, tenant, user) < learner:
            return Assignment(arm=Arm.LEARNER, propensity=(1.0 - control) * learner)
        left = (1.0 - control) * (1.0 - learner)
        if self._dealing is None:
            return Assignment(arm=Arm.LIVE, propensity=left)
        verified = self._dealing.verified if Arm.VERIFIED in loaded else 0.0
        if verified and place_of(self._verified_key, tenant, user) < verified:
            return Assignment(arm=Arm.VERIFIED, propensity=left * verified)
        left *= 1.0 - verified
        canary = self._dealing.canary if Arm.CANARY in loaded else 0.0
        previous = self._dealing.previous if Arm.PREVIOUS in loaded else 0.0
        place = place_of(self._trial_key, tenant, user)
        if place < canary:
            return Assignment(arm=Arm.CANARY, propensity=left * canary)
        if place >= 1.0 - previous:
            return Assignment(arm=Arm.PREVIOUS, propensity=left * previous)
        return Assignment(arm=Arm.LIVE, propensity=left * (1.0 - canary - previous))

    def _of_branch(self, tenant: str, user: str, loaded: Collection[str]) -> Assignment:
        if branch_of(tenant) not in loaded:
            return Assignment(arm=Arm.SHARED, propensity=1.0)
        if user == ANONYMOUS:
            return Assignment(arm=Arm.BRANCH, propensity=1.0)
        holdout = self._holdout if tenant in self._trained else 0.0
        stays = place_of(self._key, tenant, user) < holdout
        arm, propensity = (Arm.SHARED, holdout) if stays else (Arm.BRANCH, 1.0 - holdout)
        return Assignment(arm=arm, propensity=propensity)
