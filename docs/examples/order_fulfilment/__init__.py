"""An order's way through a shop, as a saga: the example that the README, the demo and the tests share.

    reserve_stock      the inventory sets the goods aside             undone by release_stock
    authorise_payment  the card is good for the amount                undone by void_authorisation
    charge_card        the pivot: from here on there is no way back   find_charge asks the bank whether it happened
    book_shipment      the carrier takes the parcel                   tried until it is done
    notify_customer    a message in the shop's outbox                 commits together with the step's outcome

    orders.py     the saga's context; orders from CSV files, or made up from a seed
    saga.py       the saga
    inventory.py  payment.py  shipping.py  outbox.py    the participants, each with a ledger of its own
    ledger.py     what their ledgers have in common: whoever comes first under a key decides
    network.py    the way to them, where requests and answers get lost
    shop.py       the participants together: what a step gets as `step.resources`
    worker.py     a worker process: `python -m sagas worker order_fulfilment.worker:make_worker`
    stops.py      people who press Stop on some of the orders
    audit.py      the ledgers against the runs; answers.py: the answers to stops against what became of them
    demo.py  workers.py  report.py    scripts/demo

README.md beside this file has the rules by which orders fail, and what the demo's numbers mean.
"""
