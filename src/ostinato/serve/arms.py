"""Assignment of users to arms: a stable hash of tenant and user, compared with the current shares. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ostinato.core.arm_assignment import ANONYMOUS, Dealing, branch_of, dealing_key, place_of
from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A user's arm, and the probability (propensity) with which a random user gets it.

    Example: ``Assignment(arm=Arm.LIVE, propensity=0.8)``
    """

    arm: Arm
    propensity: float


def slot_of(tenant: str, arm: Arm) -> str:
    """Return the slot whose weights answer a tenant's people on this arm."""
    return {Arm.BRANCH: branch_of(tenant), Arm.SHARED: Arm.LIVE.value}.get(arm, arm.value)


class Arms:
    """Assigns users to arms.

    The control arm takes a fixed share of the users by a hash of tenant and name; those users stay on it. A share `learner` of the
    others, by a second hash, always follows training and takes part in no comparison. The verified release takes its share of the others
    by a third hash. The remaining users are assigned by a fourth hash, salted for the current trial: canary takes its lower end, the
    previous release its upper end, and live the rest.

    The people of a tenant in `branches` take no part in this, so that the arms that are compared serve the same tenants. For tenants in
    `trained`, a share `holdout` of the people, by the hash of control, stays on live as the arm `shared`; so does everybody while no
    branch is loaded.

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
        """Set the shares of the current trial; None if there is none."""
        if dealing != self._dealing:
            self._dealing = dealing
            self._trial_key = b"" if dealing is None else dealing_key(dealing.salt)
            self._verified_key = b"" if dealing is None else dealing_key(f"verified {dealing.verified_salt}")

    def releases(self, loaded: Mapping[str, PolicyVersion]) -> frozenset[str]:
        """Return the loaded slots that hold a release of their own. Canary and previous do only while the trial has a share for them and
        their weights differ from live's: between trials both hold the live weights, and so does canary until the candidate is loaded.
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
        """Return the hashes of the weights that a trial compares: live's, and those of its other arms; empty without a trial."""
        beside = self.releases(loaded) & {Arm.CANARY, Arm.PREVIOUS}
        return frozenset(loaded[slot].hash for slot in (*beside, Arm.LIVE) if slot in loaded) if beside else frozenset()

    def beside(self, arm: Arm, loaded: Mapping[str, PolicyVersion]) -> frozenset[str]:
        """Return the hashes of the weights that this arm's are compared with, in a trial or for `release.best_arm`, including its own."""
        compared, measured = self.compared(loaded), (Arm.LIVE, Arm.VERIFIED)
        dealt = self._dealing is not None and self._dealing.verified > 0.0 and Arm.VERIFIED in loaded
        if dealt and arm in (*measured, Arm.CANARY, Arm.PREVIOUS):
            compared |= {loaded[slot].hash for slot in measured if slot in loaded}
        return compared

    def styled(self, tenant: str, arm: Arm, loaded: Mapping[str, PolicyVersion]) -> set[PolicyVersion]:
        """Return the versions for which a style must be approved to be dealt to this arm; empty for control, which has no styles."""
        policy, beside = loaded.get(slot_of(tenant, arm)), self.beside(arm, loaded)
        if policy is None or arm in (Arm.CONTROL, Arm.OUTSIDE):
            return set()
        return {policy, *(each for each in loaded.values() if each.hash in beside)}

    def assign(self, tenant: str, user: str, loaded: Collection[str]) -> Assignment:
        """Return the arm of a tenant's user, given the loaded slots. The share of an arm without weights goes to live."""
        if tenant in self._branches:
            return self._of_branch(tenant, user, loaded)
        if user == ANONYMOUS:  # many people behind one name, whom a hash would move all together
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
