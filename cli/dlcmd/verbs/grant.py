"""The verb `grant`."""

from diesel_fs.storage.accounts.account import (
    Role,
    check_user_name,
    parse_role,
)

from ..args.accounts import open_accounts
from ..args.options import argument, dataset, verb
from ..show.output import print_result


@verb("grant")
@argument("name", type=dataset, metavar="DATASET")
@argument("user_name", type=check_user_name, metavar="USER")
@argument("role", type=parse_role, metavar="ROLE")
def grant(name: str, user_name: str, role: Role) -> None:
    """Give a user a role on a dataset, in place of the former one.

    The dataset need not exist yet.

    \b
    The ROLE is one of:
      none   may do nothing
      read   may read
      write  may also put and delete entries
      admin  may also make, recover, purge and delete the dataset, and grant roles on it

    \b
    Examples:
      dlcmd grant pets ann read
      dlcmd grant pets ann none
    """
    with open_accounts() as accounts:
        accounts.grant(name, user_name, role)
    print_result(
        {"dataset": name, "user": user_name, "role": role.text},
        f"{user_name} may {_MAY[role]} {name}",
    )


_MAY = {
    Role.NONE: "do nothing with",
    Role.READ: "read",
    Role.WRITE: "change",
    Role.ADMIN: "administer",
}
