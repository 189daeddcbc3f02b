"""The word lists of the built-in model's language.

The lists are disjoint, so a passkey word never occurs in filler text. They fix the tokenizer's vocabulary and
the texts of :mod:`hpu_duo.lab.tasks.passkeys`; changing them means training the model again.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _words(
    """
    Ada Adam Agnes Alan Albert Alice Alma Amber Amos Andrew Angela Anna Anton Arthur Astrid Audrey Barbara
    Basil Beatrice Benjamin Bernard Bertha Bianca Boris Brenda Bruno Camille Carl Carmen Caroline Cecil
    Celia Charles Chloe Clara Claude Conrad Cora Cyril Daisy Daniel Daphne David Deborah Dennis Diana Dora
    Douglas Edgar Edith Edmund Eleanor Elias Ella Elsa Emil Emma Eric Esther Eva Felix Fiona Flora
    Florence Frank Frederick Gabriel George Gerald Gilbert Gloria Grace Greta Gustav Hannah Harold Harriet
    Harvey Hector Helen Henry Herbert Hilda Howard Hubert Hugo Ida Igor Inga Irene Isaac Isabel Ivan Jacob
    James Jane Jasper Joan Joel John Jonas Joseph Judith Julia Julian Karen Kenneth Klara Kurt Laura
    Lawrence Leah Leo Leonard Lewis Lillian Linda Louis Lucas Lucy Luther Lydia Magnus Manuel Marcus
    Margaret Maria Martha Martin Matilda Maurice Max Melissa Michael Miriam Nadia Naomi Nathan Nicholas
    Nina Nora Norman Olga Oliver Oscar Otto Patrick Paula Peter Philip Rachel Ralph Raymond Rebecca
    Richard Robert Rosa Rupert Ruth Samuel
    """
)
PASSKEY_WORDS: tuple[str, ...] = _words(
    """
    badger beaver bison buffalo camel cheetah cobra cougar coyote crab crane cricket crow dolphin donkey
    dragon eagle falcon ferret finch gazelle gecko giraffe goat gopher gorilla heron hornet hyena iguana
    jackal jaguar koala lemur leopard lizard llama lobster lynx magpie mammoth marmot mole moose moth newt
    octopus orca osprey ostrich otter panda panther parrot pelican penguin pigeon puma python rabbit
    raccoon raven salmon seal shark sloth sparrow spider squid stork swan tiger toad tortoise trout turtle
    viper vulture walrus wasp weasel whale wombat yak zebra acorn almond apple apricot avocado bacon bagel
    banana barley basil beet biscuit brandy broccoli burger butter cabbage candy caramel carrot cashew
    celery cereal cheddar cherry chili chocolate cider cinnamon clove cocoa coconut coffee cookie cracker
    cream cucumber curry custard date dill donut dumpling eggplant fennel fig flour fudge garlic ginger
    grape gravy guava hazelnut honey jelly juice kale ketchup kiwi lemon lentil lettuce lime mango maple
    melon milk mint muffin mustard noodle nutmeg oats olive onion orange oregano pancake papaya parsley
    pasta pastry peach peanut pear pepper pickle pizza plum popcorn potato pretzel prune pudding pumpkin
    radish raisin raspberry rhubarb rice saffron salad salsa sausage sherbet soup spinach squash sugar
    syrup taco thyme toast tofu tomato truffle turnip vanilla vinegar waffle walnut yogurt anchor anvil
    apron armor arrow badge balloon banjo banner barrel basket beacon bell bicycle binder blanket bolt
    bonnet bottle bracelet broom bucket buckle button cable camera candle canoe canvas cape carpet cello
    chain chalk chisel clarinet cloak compass copper cork cotton cradle crayon crown crystal cymbal dagger
    dial diamond drum easel emerald engine envelope fabric feather fiddle flag flannel flute fork funnel
    gadget garnet gear glove goblet gong granite guitar hammer hammock harp hatchet helmet hinge hook
    jacket jar jersey jewel kettle keyboard kite knob lace ladle lantern lasso leather lens locket loom
    magnet mallet marble mask medal mirror mitten mug nail napkin necklace needle opal organ oven paddle
    padlock paper parasol pearl pedal pencil pendant piano pillow pitcher plank platinum plow poncho
    propeller pulley puzzle quartz quilt quiver racket radio raft rake razor ribbon rifle rivet rocket
    rope rotor ruby ruler saddle sandal sapphire scarf scissors screw scroll shawl shovel sickle silk
    skillet slipper socket spade spatula spindle sponge spoon stapler statue stirrup strap string sword
    tablet tambourine teapot telescope tent thimble thread ticket timber toaster tongs topaz torch towel
    tractor tripod trombone trumpet tuba tunic turbine tweezers umbrella valve vase velvet vest violin
    wagon wallet whistle wick wrench zipper zither amber aqua azure beige bronze crimson indigo ivory
    lavender lilac magenta maroon mauve ochre pink scarlet teal turquoise violet autumn blizzard breeze
    cloud comet cyclone dawn dusk eclipse equinox fog frost galaxy glacier gust hail horizon hurricane
    lightning meteor mist monsoon nebula planet rainbow solstice thunder tornado tundra typhoon volcano
    winter zenith actor architect astronaut baker barber butler captain carpenter chef clown cowboy
    dentist detective diver duke emperor falconer farmer florist gardener hunter jester judge juggler
    knight lawyer magician mayor miner monk nurse painter pilot pirate plumber poet prince professor queen
    sailor scholar sculptor sheriff surgeon tailor wizard
    """
)
ADJECTIVES: tuple[str, ...] = _words(
    """
    small young quiet loud bright dark narrow wide tall short heavy gentle clever patient proud humble
    cold warm dry wet plain crowded broken clean dusty wooden golden silver pale round simple strange
    famous hidden careful cheerful
    """
)
NOUNS: tuple[str, ...] = _words(
    """
    letter story song lamp table window door chair book map ship train cart house tower bridge road garden
    kitchen clock picture stone box coat hat shoe wheel boat bench fence gate roof wall floor ladder basin
    mill barn stove desk shelf curtain journal lesson recipe poem game plan question thought dream
    """
)
PEOPLE: tuple[str, ...] = _words(
    """
    teacher doctor merchant student neighbour stranger driver singer writer builder guard clerk cousin
    nephew niece child traveller shepherd weaver potter
    """
)
VERBS: tuple[str, ...] = _words(
    """
    watched carried moved found opened closed painted repaired cleaned described measured noticed sold
    bought lifted followed admired copied studied forgot
    """
)
PLACES: tuple[str, ...] = _words(
    """
    river forest mountain valley harbour village market station library museum island meadow square castle
    beach lake school church theatre field
    """
)
TIMES: tuple[str, ...] = _words(
    """
    morning evening afternoon summer spring Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)
ADVERBS: tuple[str, ...] = _words(
    """
    slowly quickly often rarely carefully silently suddenly gladly calmly twice again together
    """
)
